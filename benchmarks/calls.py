"""What comparing a torch call with its recording takes: a user's transformer, run beside a log that answers all of its calls

The same model beside a mode that answers by the number of the call, and compares nothing, is what Python and torch take for themselves.

    PJRT_DEVICE=CPU python benchmarks/calls.py"""
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from fastcore.script import call_parse
from fastai_xla.all import *
from fastai_xla.capture.log import Log
from fastai_xla.capture.patches import logging
from fastai_xla.logged import Logged   # with all that a log does

class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv,self.out,self.up,self.down = nn.Linear(d, 3*d),nn.Linear(d, d),nn.Linear(d, 4*d),nn.Linear(4*d, d)
        self.n1,self.n2 = nn.LayerNorm(d),nn.LayerNorm(d)
    def forward(self, x):
        b,t,d = x.shape
        q,k,v = (o.view(b, t, 4, d//4).transpose(1, 2) for o in self.qkv(self.n1(x)).chunk(3, -1))
        a = (q@k.transpose(-1, -2) * (d//4)**-.5).softmax(-1)
        x = x + self.out((a@v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))

class ByNumber(TorchFunctionMode):
    "Answers the calls of a second run by those of the first"
    def __init__(self):
        super().__init__()
        self.answers,self.i = [],None
    def __torch_function__(self, f, types, args=(), kwargs=None):
        if self.i is None:
            self.answers.append(f(*args, **(kwargs or {})))
            return self.answers[-1]
        self.i += 1
        return self.answers[self.i-1]

def seconds(f):
    t = time.perf_counter()
    f()
    return time.perf_counter()-t

@call_parse
def main(
    rounds:int=300, # Runs of each kind, of which the fastest counts
    blocks:int=12, # Of the transformer
    d:int=32, # Its width
):
    model = nn.Sequential(*[Block(d) for _ in range(blocks)]).to(device()).requires_grad_(False)
    x,log,by_number = torch.randn(8, 16, d).to(device()),Log(),ByNumber()
    sync()
    def logged():
        log.begin()
        with logging(log): t = seconds(lambda: model(x))
        n,answered = len(log.path),log.answering
        if not answered: log.ended()
        log.forget()
        return t,n,answered
    plain = nn.Sequential(*[Block(d) for _ in range(blocks)]).to('meta')
    given = x.to('meta')
    def numbered():
        with by_number: return seconds(lambda: plain(given))
    with torch.no_grad():
        for _ in range(2): logged()
        numbered()
        times = []
        for _ in range(rounds):
            by_number.i = 0
            times.append((*logged(), numbered()))
    assert all(answered for _,_,answered,_ in times)
    n,compared,floor = times[0][1],min(t for t,*_ in times),min(t for *_,t in times)
    print(f"{n} calls: {compared*1e3:.2f} ms compared, {floor*1e3:.2f} ms answered by number: {(compared-floor)/n*1e6:.2f} us a call")
