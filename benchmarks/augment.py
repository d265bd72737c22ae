"""Augmentation on the XLA device against fastai's on the CPU, in one run, interleaved

    PJRT_DEVICE=CPU python benchmarks/augment.py --rounds 7"""
import time
import torch
from fastcore.script import call_parse
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.learner import register_lowerings

@call_parse
def main(
    rounds:int=7, # Rounds to take the median of
    bs:int=64, # Images
    size:int=128, # Pixels
):
    dev = device()
    register_lowerings()
    img = torch.rand(bs, 3, size, size)
    batches = {'cpu': TensorImage(img), 'xla': TensorImage(img.to(dev))}
    pipes = {k: Pipeline(aug_transforms(max_warp=.2, max_lighting=.2) + [Normalize.from_stats(*imagenet_stats, cuda=False)], split_idx=0)
             for k in batches}
    for a in pipes['xla'].fs[-1].parameters: setattr(pipes['xla'].fs[-1], a, getattr(pipes['xla'].fs[-1], a).to(dev))
    times = {k: [] for k in batches}
    for i in range(rounds+2):
        for k,x in batches.items():
            t = time.perf_counter()
            res = pipes[k](x.clone())
            if k == 'xla': sync(wait=True)
            if i > 1: times[k].append(time.perf_counter()-t)
    with count_xla() as c:
        res = pipes['xla'](batches['xla'].clone())
        sync()
    ms = {k: sorted(v)[len(v)//2]*1e3 for k,v in times.items()}
    print(f"{bs} images of {size}x{size}: {ms['xla']:.0f} ms on XLA, {ms['cpu']:.0f} ms on the CPU, ratio {ms['xla']/ms['cpu']:.2f}; {c}")
