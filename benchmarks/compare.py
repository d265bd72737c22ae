"""What it costs to run the user's Python at every step: comparing torch calls with a log, per call, beside tracing them

    PJRT_DEVICE=CPU python benchmarks/compare.py

Forward and loss of models that a user has written, no device work: CPU time, the median of 40 runs, the garbage collector off."""
import os; os.environ.setdefault('PJRT_DEVICE', 'CPU')
import gc, math, time
import torch
from torch import nn
import torch.nn.functional as F
from fastai_xla.runtime import *
from fastai_xla.graphs import *
from fastai_xla.capture.log import *
from fastai_xla.capture.patches import *
from fastai_xla.lowerings.all import register_lowerings

class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c,self.l = nn.Conv2d(1, 16, 3, 2, 1),nn.Conv2d(16, 32, 3, 2, 1),nn.Conv2d(32, 64, 3, 2, 1),nn.Linear(64, 10)
        self.n1,self.n2 = nn.BatchNorm2d(16),nn.BatchNorm2d(32)
    def forward(self, x):
        x = self.n2(self.b(self.n1(self.a(x)).relu())).relu()
        return self.l(self.c(x).relu().mean((2,3)))

class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1,self.n2,self.qkv,self.o = nn.LayerNorm(d),nn.LayerNorm(d),nn.Linear(d, 3*d),nn.Linear(d, d)
        self.u,self.w,self.h = nn.Linear(d, 4*d),nn.Linear(4*d, d),h
    def forward(self, x):
        b,t,d = x.shape
        q,k,v = (o.view(b, t, self.h, d//self.h).transpose(1, 2) for o in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.softmax(q@k.transpose(-2, -1)/math.sqrt(d//self.h), -1)
        x = x + self.o((a@v).transpose(1, 2).reshape(b, t, d))
        return x + self.w(F.gelu(self.u(self.n2(x))))

class Transformer(nn.Module):
    def __init__(self, n=12, d=32):
        super().__init__()
        self.e,self.p,self.n,self.l = nn.Embedding(50, d),nn.Parameter(torch.zeros(16, d)),nn.LayerNorm(d),nn.Linear(d, 10)
        self.bs = nn.ModuleList([Block(d, 4) for _ in range(n)])
    def forward(self, x):
        x = self.e(x) + self.p
        for b in self.bs: x = b(x)
        return self.l(self.n(x).mean(1))

def median(f, n=40):
    for _ in range(5): f()
    ts = []
    for _ in range(n):
        t = time.process_time()
        f()
        ts.append(time.process_time()-t)
    return sorted(ts)[n//2]*1e6

def measure(name, model, x, y):
    dev = device()
    model,x,y,log = model.to(dev),x.to(dev),y.to(dev),Log()
    step = lambda: F.cross_entropy(model(x), y)
    def logged():
        log.begin()
        with logging(log): loss = step()
        if not log.answering: log.ended()
        return len(log.path)
    def traced():
        step()
        drop_pending()
    settle_tensors()
    logged()
    settle_tensors()
    n = logged()
    assert log.answering
    gc.disable()
    compare,trace = median(logged),median(traced)
    gc.enable()
    print(f'{name:28s} {n:4d} calls; compared {compare:7.0f} us, {compare/n:.2f} a call; traced {trace:7.0f} us, {trace/n:.1f} a call')

if __name__ == '__main__':
    register_lowerings()
    torch.manual_seed(0)
    measure('convnet', Conv(), torch.randn(8, 1, 28, 28), torch.randint(10, (8,)))
    measure('transformer of 12 blocks', Transformer(), torch.randint(50, (8, 16)), torch.randint(10, (8,)))
