"Modules and other objects of libraries that a callback shares with what makes items, or with a loss that is a function"
from unittest.mock import Mock
import pytest
from fastai.vision.all import *
from torchvision import transforms as T
from fastai_xla.all import *
from test_put_on_a_learner import fitted, learner

modes = dict(auto={}, several=dict(steps_per_execution=3))

def as_on_the_cpu(run, modes):
    "`run` gives the numbers of a fit, on the CPU for `None`, without its callback for `changes=False`"
    want = run(None)
    for xla in modes: assert (run(xla) - want).abs().max() < 1e-4
    assert (run(None, changes=False) - want).abs().max() > 1e-2   # it does change the numbers

class Changes(Callback):
    "Sets an attribute of what it holds, or has its method do so"
    def __init__(self, part): self.part = part
    def after_batch(self):
        if self.training and self.train_iter in (5, 8): self.change(.3 if self.train_iter == 5 else -.2)

class SetsThreshold(Changes):
    def change(self, v): self.part.threshold = v

class SetsDelta(Changes):
    def change(self, v): self.part.delta = .1 + abs(v)

class Calls(Changes):
    def change(self, v): self.part.set(v)

class CFG: least = -1.

class SetsConfig(Changes):
    def change(self, v): CFG.least = v

# Transforms of items: most of torchvision's are modules, too

class Floor(nn.Module):
    "A transform of the user's"
    def __init__(self):
        super().__init__()
        self.least,self.cut = -1.,nn.Threshold(-1., 0.)
    def forward(self, x): return F.threshold(self.cut(x), self.least, 0.)
    def set(self, v): self.least = v

class FloorOfConfig(nn.Module):
    def forward(self, x): return F.threshold(x, CFG.least, 0.)

class Items:
    def __init__(self, tfm, n=48):
        self.tfm,self.x = tfm,torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.tfm(self.x[i]),self.x[i].sum()[None].tanh()

def of_items(tfm, cb, part):
    CFG.least = -1.
    learn = learner()
    learn.dls = DataLoaders(DataLoader(Items(tfm), bs=4), DataLoader(Items(noop, 16), bs=8))
    return learn,(cb(part) if cb else None)

def threshold(cb):
    tfm = nn.Threshold(-1., 0.)
    return of_items(tfm, cb and SetsThreshold, tfm)

def in_a_compose(cb):
    tfm = nn.Threshold(-1., 0.)
    return of_items(T.Compose([nn.Identity(), tfm]), cb and SetsThreshold, tfm)

class SetsLambda(Changes):
    def change(self, v): self.part.lambd = lambda x: F.threshold(x, v, 0.)

def object_of_a_library(cb):
    tfm = T.Lambda(noop)
    return of_items(T.Compose([tfm]), cb and SetsLambda, tfm)

def in_a_module(cb):
    tfm = Floor()
    return of_items(nn.Sequential(tfm), cb and SetsThreshold, tfm.cut)

def by_a_method(cb):
    tfm = Floor()
    return of_items(tfm, cb and Calls, tfm)

cuts = nn.Threshold(-1., 0.)

class SetsNamed(Changes):
    def change(self, v): cuts.threshold = v

def named_by_both(cb):
    cuts.threshold = -1.
    return of_items(lambda x: cuts(x), cb and SetsNamed, None)

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('by', torch.ones(1))
    def forward(self, x): return x*self.by

class Halves(Changes):
    def change(self, v): self.part.mul_(.5)

def buffer_in_place(cb):
    tfm = Scale()
    return of_items(tfm, cb and Halves, tfm.by)

class Least:
    value = -1.
    @classmethod
    def cut(cls, x): return F.threshold(x, cls.value, 0.)
    @classmethod
    def set(cls, v): cls.value = v

def class_method(cb):
    Least.value = -1.
    return of_items(Least.cut, cb and Calls, Least)

def named_in_forward(cb): return of_items(nn.Sequential(FloorOfConfig()), cb and SetsConfig, None)

@pytest.mark.parametrize('make', (threshold, in_a_compose, object_of_a_library, in_a_module, by_a_method, named_by_both, buffer_in_place,
    class_method, named_in_forward))
def test_a_module_that_transforms_items(make):
    "Batches are not read ahead"
    def run(xla, changes=True):
        learn,cb = make(changes)
        return fitted(learn, xla, cb)
    as_on_the_cpu(run, [{}])

# Losses

class Mixed:
    def __init__(self, part): self.parts = [part, nn.MSELoss()]
    def __call__(self, p, t): return self.parts[0](p, t) + .3*self.parts[1](p, t)

def function(huber):
    def loss(p, t): return huber(p, t)
    return loss

def cut_by(cut): return lambda p, t: F.mse_loss(cut(p), t)

# how a loss is made of the part, the part, and the callback that changes it
losses = dict(object=(Mixed, nn.HuberLoss, SetsDelta), function=(function, nn.HuberLoss, SetsDelta),
    lambda_of_an_object=(lambda huber: (lambda p, t, loss=Mixed(huber): loss(p, t)), nn.HuberLoss, SetsDelta),
    method=(lambda huber: Mixed(huber).__call__, nn.HuberLoss, SetsDelta), object_of_a_library=(cut_by, lambda: T.Lambda(noop), SetsLambda))

@pytest.mark.parametrize('name', losses)
@pytest.mark.filterwarnings('ignore:`steps_per_execution')
def test_a_part_of_a_loss_that_is_a_function(name):
    make,part_of,cb = losses[name]
    def run(xla, changes=True):
        part = part_of()
        return fitted(learner(make(part)), xla, cb(part) if changes else None)
    as_on_the_cpu(run, modes.values())

@pytest.mark.filterwarnings('ignore:`steps_per_execution')
def test_weights_of_a_loss_change_in_place():
    def run(xla, changes=True):
        learn = learner(nn.BCEWithLogitsLoss(pos_weight=tensor([2.])))
        if xla is not None: learn.to_xla(**xla)
        return fitted(learn, None, Halves(learn.loss_func.pos_weight) if changes else None)
    as_on_the_cpu(run, modes.values())

# Objects that only look like modules or containers

class Buffers:
    "A loss with `_buffers` of its own"
    def __init__(self): self._buffers = [1.]
    def __call__(self, p, t): return F.mse_loss(p, t)*self._buffers[0]

@pytest.mark.filterwarnings('ignore:`steps_per_execution')
def test_a_loss_with_buffers_that_is_no_module():
    class Looks(Callback):
        def after_batch(self): self.seen = self.iter
    want = fitted(learner(Buffers()), None, Looks())
    assert (fitted(learner(Buffers()), modes['several'], Looks()) - want).abs().max() < 1e-4

@pytest.mark.parametrize('mode', modes)
@pytest.mark.filterwarnings('ignore:`steps_per_execution')
def test_a_mock_of_a_dict(mode):
    "It says that it is a dict, and has no items"
    class Holds(Callback):
        def after_batch(self): self.seen = self.table
    def run(xla):
        cb,items = Holds(),Items(noop)
        cb.table,items.table = Mock(spec=dict),Mock(spec=dict)
        learn = learner()
        learn.dls = DataLoaders(DataLoader(items, bs=4), DataLoader(Items(noop, 16), bs=8))
        return fitted(learn, xla, cb)
    assert (run(modes[mode]) - run(None)).abs().max() < 1e-4
