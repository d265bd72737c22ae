"""An LSTM's training step as a loop on the device, side by side with torch_xla's unrolled kernel and PyTorch on the CPU

    PJRT_DEVICE=CPU python benchmarks/rnn.py --steps 18 72 --unrolled 18 72"""
import argparse, time
from contextlib import nullcontext
from statistics import median
import torch
from torch import nn
from fastai_xla.runtime import *
from fastai_xla.lowerings.core import register_lowerings, without_lowerings
import fastai_xla.lowerings.rnn

def make(dev, n_hid, layers):
    torch.manual_seed(0)
    return nn.LSTM(n_hid, n_hid, layers).to(dev)

def step(m, x):
    "Forward, backward, update"
    m(x)[0].pow(2).mean().backward()
    with torch.no_grad():
        for p in m.parameters():
            p.sub_(p.grad*1e-3)
            p.grad = None

class Racer:
    def __init__(self, name, steps, args, loop=True):
        self.name,self.loop,self.times,self.host,self.compile_s = name,loop,[],[],0.
        dev = torch.device('cpu') if name == 'cpu' else device()
        self.m,self.x = make(dev, args.hidden, args.layers),torch.randn(steps, args.batch, args.hidden).to(dev)
        sync(wait=True)
        with count_xla() as n:
            for _ in range(2): self.run()
        self.compile_s,self.times,self.host = n.compile_s,[],[]
    def run(self):
        with nullcontext() if self.loop else without_lowerings('rnn'):
            start = time.perf_counter()
            step(self.m, self.x)
        self.host.append(time.perf_counter()-start)
        if is_xla(self.x): sync(wait=True)
        self.times.append(time.perf_counter()-start)

def main():
    p = argparse.ArgumentParser()
    p.add_argument('--steps', type=int, nargs='+', default=[18,72])
    p.add_argument('--unrolled', type=int, nargs='*', default=[],
                   help='lengths at which to run the unrolled kernel too, which compiles for minutes')
    for k,v in dict(hidden=400, layers=3, batch=16, n=15).items(): p.add_argument(f'--{k}', type=int, default=v)
    args = p.parse_args()
    device()
    register_lowerings()
    compiled = {}
    for steps in args.steps:
        racers = ([Racer('loop', steps, args), Racer('cpu', steps, args)]
                  + ([Racer('unrolled', steps, args, loop=False)] if steps in args.unrolled else []))
        for _ in range(args.n):
            for r in racers: r.run()
        compiled[steps],base = racers[0].compile_s,median(racers[0].times)
        for r in racers:
            t = median(r.times)
            print(f'{steps:4} steps  {r.name:9} compile {r.compile_s:6.1f} s   step {t*1e3:7.1f} ms (best '
                  f'{min(r.times)*1e3:.1f})   host {median(r.host)*1e3:6.1f} ms   loop takes {base/t:.2f} of it', flush=True)
    first,last = compiled[args.steps[0]],compiled[args.steps[-1]]
    print(f'compile at {args.steps[-1]} / at {args.steps[0]}: {last/first:.2f}')

if __name__ == '__main__': main()
