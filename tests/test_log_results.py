"Learners with code of the user's: teachers, optimizers, results that somebody holds after the step, random numbers and branches"
import dataclasses, random
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
import torch, torch.nn.functional as F
from torch import nn
from by_log import *

class Teacher(Callback):
    "An average of the weights, in training mode in one epoch"
    def before_fit(self): self.t = deepcopy(self.model).eval()
    def before_epoch(self): self.t.train(self.epoch == 1)
    def after_loss(self):
        if not self.training: return
        with torch.no_grad(): q = self.t(self.x)
        self.learn.loss_grad = self.learn.loss_grad + .3*(self.learn.pred-q).pow(2).mean()*(1+self.iter/10)
    def after_step(self):
        with torch.no_grad():
            for a,b in zip(self.t.parameters(), self.model.parameters()): a.lerp_(b, .1)

def with_dropout(): return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(.2), nn.Linear(16, 1))
def test_a_teacher(): agree(lambda: dict(model=with_dropout, cbs=Teacher), branches=2, cpu=False)

# --- optimizers

class TorchSchedule(Callback):
    "Steps after the optimizer, within the step"
    def before_fit(self): self.s = torch.optim.lr_scheduler.StepLR(self.opt.opt, 4, .5)
    def after_step(self): self.s.step()
def test_a_schedule_that_steps_within_the_step():
    agree(lambda: dict(opt_func=partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9), cbs=TorchSchedule))

class Freeze(Callback):
    def before_epoch(self): self.model[0].weight.requires_grad_(self.epoch != 1)
def keep(x): return x
def test_freezing(): agree(lambda: dict(loss_func=lambda: lambda p,y: F.mse_loss(keep(p), y), cbs=Freeze), branches=2, valid=2, cpu=False)

# --- who holds results after the step

class Keeps(Callback):
    "A list of (step, loss), a deque, a closure, a namespace"
    def before_fit(self): self.all,self.rare,self.fs,self.prev = [],[],[],None
    def after_loss(self):
        l = self.learn.loss.detach()
        self.all.append((self.iter, l))
        if self.iter == 5 and self.epoch == 1: self.rare.append(self.learn.pred.detach()*2)
        v = l*3
        self.fs.append(lambda: v)
        self.ns = SimpleNamespace(d={'z': [self.learn.pred.detach()]})
        if self.prev is not None and self.training: self.learn.loss_grad = self.learn.loss_grad + .01*self.prev
        self.prev = l

def test_results_that_somebody_holds():
    cbs = []
    def story():
        cbs.append(Keeps())
        return dict(cbs=lambda: cbs[-1], see=lambda learn: (lambda c: [c.all, c.rare, [f() for f in c.fs], c.ns.d])(cbs[-1]))
    agree(story, branches=3)   # the first, those with one before, the rare one
    assert len({float(l) for _,l in cbs[1].all}) == 36   # each step its own

@dataclasses.dataclass
class Out: a: object; b: object; n: int = 0
class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(6, 16),nn.Linear(16, 1)
    def forward(self, x):
        h = self.a(x).relu()
        self.acts = dict(h=h.detach())
        return Out(self.b(h), h, len(x))
class Looks(Callback):
    def before_fit(self): self.seen = []
    def after_batch(self): self.seen.append(self.learn.pred.b.detach().mean().item())
def out_loss(p, t): return F.mse_loss(p.a, t) + .01*p.b.pow(2).mean()

def test_a_model_that_returns_an_object():
    cbs = []
    def story():
        cbs.append(Looks())
        return dict(model=Returns, loss_func=lambda: out_loss, cbs=lambda: cbs[-1], see=lambda learn: [cbs[-1].seen, learn.model.acts])
    agree(story)

# --- random numbers, branches

class DeviceRandom(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(6, 16),nn.Linear(16, 1)
    def forward(self, x):
        h = F.dropout(self.a(x + .1*torch.randn_like(x)).relu(), .3, self.training)
        return self.b(h*(torch.rand(len(x), 1, device=x.device) < .9))
def test_random_numbers_of_the_device(): agree(lambda: dict(model=DeviceRandom), cpu=False)

class StochasticDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.m = nn.Linear(6, 16),nn.Linear(16, 1),nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
    def forward(self, x):
        h = self.a(x)
        for m in self.m:
            if not self.training or random.random() < .5: h = h + m(h).relu()
        return self.b(h)
def test_a_branch_for_each_depth():
    learn = agree(lambda: dict(model=StochasticDepth), branches=None, n=4)
    assert counts(learn)[True]['compiled'] <= 6 and counts(learn)[True]['replayed'] >= 32

# --- a library's module that fills a cache

caches = '''
import torch
from torch import nn

class Biases(nn.Module):
    "As in timm's levit: looked up once in evaluation, and forgotten by `train`"
    def __init__(self):
        super().__init__()
        self.biases,self.cache = nn.Parameter(torch.linspace(-1, 1, 16)),{}
    def train(self, mode=True):
        if mode: self.cache = {}
        return super().train(mode)
    def forward(self, x):
        if self.training: return x + self.biases.flip(0)
        if 'flipped' not in self.cache: self.cache['flipped'] = self.biases.flip(0)
        return x + self.cache['flipped']
'''

def with_cache():
    scope = dict(__name__='timm.biases')
    exec(caches, scope)
    return nn.Sequential(nn.Linear(6, 16), scope['Biases'](), nn.ReLU(), nn.Linear(16, 1))

class Doubles(Callback):
    def after_pred(self): self.learn.pred = self.pred*2
def test_a_module_of_a_library_fills_a_cache(): agree(lambda: dict(model=with_cache, cbs=Doubles), valid=None)
