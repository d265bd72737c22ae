"""Langevin sampling of a small ResNet with BatchNorm, beside the loop one writes first

    PJRT_DEVICE=CPU python benchmarks/sampling.py

The naive loop draws its noise on the host, multiplies by float step sizes that change, and reads the energy with `.item()`:
its graph grows, and compiles, at each step. Two that know better: the same with a sync after reading the energy, and with
a sync before. All three share equal constants, as torch_xla does when left to itself."""
import argparse, time
from functools import partial
from statistics import median
import torch
from torch import nn
from fastai.layers import ConvLayer, Flatten, ResBlock
from fastai_xla.runtime import *
from fastai_xla.graphs import *
from fastai_xla.lowerings.all import register_lowerings
from fastai_xla.sampling import langevin_sample

def make(nf):
    block = partial(ResBlock, 1, act_cls=nn.SiLU)
    torch.manual_seed(0)
    return nn.Sequential(ConvLayer(1, nf, act_cls=nn.SiLU), block(nf, nf), block(nf, 2*nf, stride=2),
                         block(2*nf, 2*nf, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(2*nf, 1)).eval()

def naive(energy, x, step_sizes, when):
    for step in step_sizes:
        with shared_scalars():
            x = x.detach().requires_grad_()
            e = energy(x).sum()
            g, = torch.autograd.grad(e, x)
            x = (x - step/2*g + torch.randn(x.shape).to(x.device)*step**.5).detach()
        if when == 'before': sync()
        e.item()
        if when == 'after': sync()
    return x

def ours(energy, x, step_sizes): return langevin_sample(energy, x, len(step_sizes), step_sizes, progress=False)

class Racer:
    def __init__(self, name, f, energy, x): self.name,self.f,self.energy,self.x,self.times = name,f,energy,x,[]
    def run(self, n, record=True):
        sizes = torch.linspace(.1, .01, n).tolist()
        sync(wait=True)
        start = time.perf_counter()
        with count_xla() as c:
            self.f(self.energy, self.x, sizes)
            sync(wait=True)
        if record: self.times.append((time.perf_counter()-start)/n*1e3)
        return c

def main():
    p = argparse.ArgumentParser()
    for k,v in dict(width=32, size=8, batch=64, steps=50, rounds=9, naive_steps=5).items(): p.add_argument(f'--{k}', type=int, default=v)
    args = p.parse_args()
    dev = device()
    register_lowerings()
    energy,x = make(args.width).to(dev),torch.randn(args.batch, 1, args.size, args.size).to(dev)
    racers = ([Racer('langevin_sample', ours, energy, x)]
              + [Racer(f'naive, sync {w} .item()', partial(naive, when=w), energy, x) for w in ('before', 'after')])
    for r in racers:
        first,second,third = r.run(args.steps, False),r.run(args.steps, False),r.run(args.steps, False)
        print(f'{r.name:27} compiles {first.compiles}, {second.compiles}, {third.compiles}   executions a '
              f'step {third.executions/args.steps:.2f}   to host {third.to_host/args.steps:.2f}', flush=True)
    for _ in range(args.rounds):
        for r in racers: r.run(args.steps)
    base = median(racers[0].times)
    for r in racers:
        print(f'{r.name:27} {median(r.times):8.2f} ms a step (best {min(r.times):.2f})   '
              f'langevin_sample takes {base/median(r.times):.2f} of it', flush=True)
    grows = Racer('naive', partial(naive, when=None), energy, x)
    c = grows.run(args.naive_steps)
    print(f'{grows.name:27} {grows.times[0]:8.0f} ms a step over {args.naive_steps} steps   langevin_sample takes '
          f'{base/grows.times[0]:.5f} of it   ({c.compiles} compiles, {c.compile_s:.0f} s; each step compiles a larger graph)', flush=True)

if __name__ == '__main__': main()
