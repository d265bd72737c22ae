"""Does training mind what a TPU's matrix products keep? Losses in float32, and with products as on a TPU, over several seeds

    PJRT_DEVICE=CPU python benchmarks/numerics.py --seeds 5"""
import tempfile
from contextlib import nullcontext
from functools import cache
import numpy as np, pandas as pd
from fastcore.script import call_parse
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.cases import language_model, tabular
from fastai_xla.cli import digits_dls, digits_path

@cache
def _digits(): return digits_path(tempfile.mkdtemp())

def digits():
    model = nn.Sequential(ConvLayer(1, 16, stride=2), ConvLayer(16, 32, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(32, 10))
    return Learner(digits_dls(_digits()), model, loss_func=CrossEntropyLossFlat())

cases = dict(digits=(digits, 1e-2), tabular=(tabular, 1e-3), language_model=(language_model, 1e-3))

def final(make, lr, seed, context):
    "Training loss over the last quarter, and validation loss"
    set_seed(seed, reproducible=True)
    learn = make().remove_cb(ProgressCallback).to_xla()
    with context, learn.no_logging(): learn.fit_one_cycle(4, lr)
    losses = [float(l) for l in learn.recorder.losses]
    return np.mean(losses[-len(losses)//4:]),learn.recorder.values[-1][1]

@call_parse
def main(
    seeds:int=5, # Seeds for each case
    precision:str='default', # What products keep, as on a TPU
):
    "A table: means over the seeds, their spread, and how far the rounded products are from float32"
    rows = {}
    for name,(make,lr) in cases.items():
        exact,rounded = (np.array([final(make, lr, s, c()) for s in range(seeds)]) for c in (nullcontext, lambda: tpu_numerics(precision)))
        for i,kind in enumerate(('training', 'validation')):
            a,b = exact[:,i],rounded[:,i]
            rows[name,kind] = {'float32': a.mean(), precision: b.mean(), 'spread over seeds': a.std(ddof=1), 'difference': (b-a).mean(),
                               'largest difference': np.abs(b-a).max()}
    print(pd.DataFrame(rows).T.to_string(float_format='{:.5f}'.format))
