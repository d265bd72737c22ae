"""What it costs to run the user's Python at every step: comparing torch calls with a log, per call, beside tracing them

    PJRT_DEVICE=CPU python benchmarks/compare.py

Forward and loss of models that a user has written, no device work: CPU time, medians of runs that take turns, the garbage collector off.
"Python alone" answers each torch call without a look at it: what the user's code itself takes, and torch's way to the log."""
import os; os.environ.setdefault('PJRT_DEVICE', 'CPU')
import gc, math, time
import torch
from torch.overrides import TorchFunctionMode
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

class Answers(TorchFunctionMode):
    "Answers each torch call with what it gave the first time, without a look at its arguments: the user's Python alone"
    def __init__(self): super().__init__(); self.given,self.i = [],None
    def __torch_function__(self, f, types, args=(), kwargs=None):
        if self.i is None:
            self.given.append(f(*args, **(kwargs or {})))
            return self.given[-1]
        self.i += 1
        return self.given[self.i-1]

def took(f):
    t = time.process_time_ns()
    f()
    return (time.process_time_ns()-t)/1e3

def measure(name, model, x, y, n=200):
    dev = device()
    model,x,y,log,answers = model.to(dev),x.to(dev),y.to(dev),Log(),Answers()
    step = lambda: F.cross_entropy(model(x), y)
    def alone():
        with answers: step()
        answers.i = 0
    def compared():
        log.begin()
        with logging(log): loss = step()
        if not log.answering: log.ended()
        return len(log.path)
    def traced():
        step()
        drop_pending()
    alone()
    settle_tensors()
    compared()
    settle_tensors()
    calls = compared()
    assert log.answering
    gc.disable()
    ts = [[took(alone), took(compared), *([took(traced)] if i%10 == 0 else [])] for i in range(n)]
    gc.enable()
    py,log_ = (sorted(t[i] for t in ts)[n//2] for i in (0, 1))
    trace = sorted(t[2] for t in ts if len(t) > 2)[n//20]
    print(f'{name:25s} {calls:4d} calls; Python alone {py:5.0f} us, compared {log_:5.0f} us: comparing {(log_-py)/calls:.1f} us a call, '
          f'{(log_-py)/py:.1f} times the Python; traced {trace/calls:.0f} us a call')

if __name__ == '__main__':
    register_lowerings()
    torch.manual_seed(0)
    measure('convnet', Conv(), torch.randn(8, 1, 28, 28), torch.randint(10, (8,)))
    measure('transformer of 12 blocks', Transformer(), torch.randint(50, (8, 16)), torch.randint(10, (8,)))
