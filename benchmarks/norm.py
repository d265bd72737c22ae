"""Training steps of a convolutional network with different norm layers on the XLA device, interleaved

    PJRT_DEVICE=CPU python benchmarks/norm.py --rounds 40"""
import math, time
from contextlib import nullcontext
from statistics import median
import torch
from torch import nn
import torch.nn.functional as F
from fastcore.script import call_parse
from fastai.layers import ConvLayer
from fastai_xla.runtime import *
from fastai_xla.lowerings.all import register_lowerings
from fastai_xla.lowerings.core import without_lowerings
from fastai_xla.norm import RunningBatchNorm2d
from fastai_xla.convert import convert_norm

class Lesson10(nn.Module):
    "RunningBatchNorm of fast.ai's lesson 10"
    def __init__(self, nf, mom=.1, eps=1e-5):
        super().__init__()
        self.mom,self.eps = mom,eps
        self.mults,self.adds = nn.Parameter(torch.ones(nf, 1, 1)),nn.Parameter(torch.zeros(nf, 1, 1))
        for n in ('sums', 'sqrs'): self.register_buffer(n, torch.zeros(1, nf, 1, 1))
        for n in ('batch', 'count', 'step'): self.register_buffer(n, torch.tensor(0.))

    def update_stats(self, x):
        bs,nc,*_ = x.shape
        self.sums.detach_()
        self.sqrs.detach_()
        s,ss,c = x.sum((0,2,3), keepdim=True),(x*x).sum((0,2,3), keepdim=True),self.count.new_tensor(x.numel()/nc)
        mom1 = s.new_tensor(1-(1-self.mom)/math.sqrt(bs-1))
        for b,v in ((self.sums, s), (self.sqrs, ss), (self.count, c)): b.lerp_(v, mom1)
        self.batch += bs
        self.step += 1

    def forward(self, x):
        if self.training: self.update_stats(x)
        means = self.sums/self.count
        var = (self.sqrs/self.count).sub_(means*means)
        if bool(self.batch < 20): var.clamp_min_(.01)
        return (x-means).div_((var.add_(self.eps)).sqrt()).mul_(self.mults).add_(self.adds)

def network(kind):
    torch.manual_seed(0)
    m = nn.Sequential(ConvLayer(3, 16), ConvLayer(16, 32, stride=2), ConvLayer(32, 64, stride=2),
                      ConvLayer(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    if kind == 'group': convert_norm(m, 'group', verbose=False)
    if kind.startswith('running'):
        convert_norm(m, 'running', verbose=False, update_every=int(kind.split()[-1]) if ' ' in kind else 1, warmup=0)
    if kind == 'lesson 10':
        for l in m[:4]: l[1] = Lesson10(l[1].num_features)
    return m

class Racer:
    def __init__(self, kind, x, y):
        self.kind,self.m,self.x,self.y,self.times,self.host,self.cpu = kind,network(kind).to(x.device),x,y,[],[],[]
        self.ps = list(self.m.parameters())
        for _ in range(8): self.run()
        with count_xla() as self.cost:
            for _ in range(8): self.run()
    def run(self):
        with without_lowerings('batch_norm') if self.kind == 'batch, stock kernel' else nullcontext():
            start,cpu = time.perf_counter(),time.process_time()
            F.cross_entropy(self.m(self.x), self.y).backward()
            with torch.no_grad():
                for p in self.ps:
                    p.sub_(p.grad*1e-2)
                    p.grad = None
        self.host.append(time.perf_counter()-start)
        sync(wait=True)
        self.times.append(time.perf_counter()-start)
        self.cpu.append(time.process_time()-cpu)

@call_parse
def main(
    rounds:int=40, # Steps of each
    bs:int=64, # Images
    size:int=32, # Pixels
):
    dev = device()
    register_lowerings()
    x,y = torch.randn(bs, 3, size, size).to(dev),torch.randint(10, (bs,)).to(dev)
    racers = [Racer(k, x, y) for k in ('batch', 'batch, stock kernel', 'running', 'running 4', 'running 10', 'group', 'lesson 10')]
    for r in racers: r.times,r.host,r.cpu = [],[],[]
    for _ in range(rounds):
        for r in racers: r.run()
    base = racers[0]
    # where steps are skipped the median alone would see only the cheap ones
    ratios = lambda a,b: (median(x/y for x,y in zip(a, b)),sum(a)/sum(b))
    for r in racers:
        (w,wm),(c,cm) = ratios(r.times, base.times),ratios(r.cpu, base.cpu)
        print(f'{r.kind:20} median {median(r.times)*1e3:6.1f} ms, host {median(r.host)*1e3:5.1f} ms   '
              f'against batch, wall: median {w:.2f}, mean {wm:.2f}; CPU time: median {c:.2f}, mean {cm:.2f}'
              f'   executions/step {r.cost.executions/8:.0f}, compiles in steps 9-16: {r.cost.compiles}')
