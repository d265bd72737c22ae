"The versions of RunningBatchNorm of lesson 10 and its forum thread, as controls, and a comparison in float64"
import math
import numpy as np
import torch
from torch import nn
from fastai.vision.all import *
from fastai_xla.all import *

torch.set_num_threads(1)
device()

# The controls

class Lesson10(nn.Module):
    "As in lesson 10"
    def __init__(self, nf, mom=.1, eps=1e-5):
        super().__init__()
        self.mom,self.eps = mom,eps
        self.mults,self.adds = nn.Parameter(torch.ones(nf, 1, 1)),nn.Parameter(torch.zeros(nf, 1, 1))
        for n in ('sums', 'sqrs'): self.register_buffer(n, torch.zeros(1, nf, 1, 1))
        for n in ('batch', 'count', 'step'): self.register_buffer(n, torch.tensor(0.))
    def update_stats(self, x):
        bs,nc,*_ = x.shape
        self.sums.detach_(); self.sqrs.detach_()
        s,ss,c = x.sum((0,2,3), keepdim=True),(x*x).sum((0,2,3), keepdim=True),self.count.new_tensor(x.numel()/nc)
        mom1 = s.new_tensor(1-(1-self.mom)/math.sqrt(bs-1))
        self.sums.lerp_(s, mom1); self.sqrs.lerp_(ss, mom1); self.count.lerp_(c, mom1)
        self.batch += bs
        self.step += 1
    def forward(self, x):
        if self.training: self.update_stats(x)
        means = self.sums/self.count
        var = (self.sqrs/self.count).sub_(means*means)
        if bool(self.batch < 20): var.clamp_min_(.01)
        return (x-means).div_((var.add_(self.eps)).sqrt()).mul_(self.mults).add_(self.adds)

class Thread(nn.Module):
    "The version of the thread that skips, one step in `skip`"
    def __init__(self, nf, mom=.1, eps=1e-5, skip=2):
        super().__init__()
        self.mom,self.eps,self.skip = mom,eps,skip
        self.mults,self.adds = nn.Parameter(torch.ones(nf, 1, 1)),nn.Parameter(torch.zeros(nf, 1, 1))
        for n in ('sums', 'sqrs'): self.register_buffer(n, torch.zeros(1, nf, 1, 1))
        self.register_buffer('count', torch.tensor(0.))
        self.batch = self.iter = 0
    def update_stats(self, x):
        bs,nc,*_ = x.shape
        self.batch += bs
        self.iter += 1
        if self.batch > 1000 and self.iter % self.skip:
            self.means.detach_(); self.stds.detach_()
            return
        self.sums.detach_(); self.sqrs.detach_()
        s,ss,c = x.sum((0,2,3), keepdim=True),(x*x).sum((0,2,3), keepdim=True),x.new_tensor(x.numel()/nc)
        mom1 = s.new_tensor(1-(1-self.mom)**(bs/32))
        self.sums.lerp_(s, mom1); self.sqrs.lerp_(ss, mom1); self.count.lerp_(c, mom1)
        self.means = self.sums/self.count
        self.stds = ((self.sqrs/self.count).sub_(self.means.pow(2)).clamp_min_(0) + self.eps).sqrt()
        if self.batch < 20: self.stds = self.stds.clamp_min(.1)
    def forward(self, x):
        if self.training: self.update_stats(x)
        factor = self.mults/self.stds
        return x*factor + self.adds-self.means*factor

def close(actual, expected, tol=1e-5):
    e = torch.as_tensor(np.asarray(expected))
    err = (actual.detach().cpu().double()-e).abs().max().item()/max(e.abs().max().item(), 1e-12)
    assert err < tol, err
