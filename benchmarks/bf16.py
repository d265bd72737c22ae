"""Digits in bfloat16 and in float32, on XLA: accuracy over several seeds

    PJRT_DEVICE=CPU python benchmarks/bf16.py --seeds 3"""
import tempfile
import numpy as np
from fastcore.script import call_parse
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.cli import digits_path, digits_dls, digits_model

@call_parse
def main(
    seeds:int=3, # Seeds to average over
    epochs:int=10, # Epochs of each training
):
    path = digits_path(tempfile.mkdtemp())
    acc = {'float32': [], 'bfloat16': []}
    for seed in range(seeds):
        for name in acc:
            set_seed(seed, reproducible=True)
            learn = Learner(digits_dls(path), digits_model(), loss_func=CrossEntropyLossFlat(),
                            metrics=accuracy).remove_cb(ProgressCallback).to_xla()
            if name == 'bfloat16': learn.to_bf16()
            with learn.no_logging(): learn.fit_one_cycle(epochs, 5e-3)
            acc[name].append(learn.recorder.values[-1][-1])
    for name,a in acc.items(): print(f'{name:9} {np.mean(a):.4f}  ({", ".join(f"{o:.4f}" for o in a)})')
    types = ({p.dtype for p in learn.model.parameters()} | {b.dtype for b in learn.model.buffers() if b.is_floating_point()}
             | {t.dtype for s in learn.opt.state.values() for t in s.values() if isinstance(t, Tensor)})
    print('parameters, BatchNorm statistics and optimizer state in bfloat16 training:',
          types, 'difference', f'{np.mean(acc["bfloat16"])-np.mean(acc["float32"]):+.4f}')
