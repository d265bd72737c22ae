"""Code that changes, between two batches, what items are made of: the next item has the change, as in fastai

Batches are read ahead in a thread, and a change must not come two batches late. What reaches what is found by objects and by names."""
import os, types
import pytest, torch
from torch import nn
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.data import in_turn

class CFG: p,by = 0.,dict(p=0.)
settings = types.ModuleType('settings')
STEP,box = 0,[0.]

class Items:
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x,self.y = torch.randn(40, 4, generator=g),torch.randn(40, 1, generator=g)
    def __len__(self): return 40
    def __getitem__(self, i): return self.x[i]*(1+self.factor()),self.y[i]
    def factor(self): return 0.

class OfClass(Items):
    def factor(self): return CFG.p
class OfClassDict(Items):
    def factor(self): return CFG.by['p']
class OfGlobal(Items):
    def factor(self): return STEP*.05
class OfModule(Items):
    def factor(self): return settings.p
class OfEnvironment(Items):
    def factor(self): return float(os.environ.get('FACTOR_OF_ITEMS', 0))
class OfOwnClass(Items):
    p = 0.
    def factor(self): return self.p
class Boxed(ItemTransform):
    def encodes(self, o): return (o[0]*(1+by_box()), *o[1:])
def by_box(): return box[0]
class Collates:
    def __init__(self): self.lam = 0.
    def __call__(self, b): return tuple(torch.stack(o)*(1+self.lam) for o in zip(*b))
class OwnLoader(TfmdDL):
    lam = 0.
    def create_batch(self, b): return tuple(torch.stack(o)*(1+self.lam) for o in zip(*b))

def of_class(cb): CFG.p += .05
def of_class_dict(cb): CFG.by['p'] += .05
def of_global(cb):
    global STEP
    STEP += 1
def of_module(cb): settings.p += .05
def of_environment(cb): os.environ['FACTOR_OF_ITEMS'] = str(float(os.environ.get('FACTOR_OF_ITEMS', 0))+.05)
def of_own_class(cb): OfOwnClass.p += .05
def in_box(cb): box[0] += .05
def of_collate(cb): cb.collate.lam += .05
def of_loader(cb): cb.dl.lam += .05

class Changes(Callback):
    def __init__(self, f, collate): self.f,self.collate = f,collate
    def after_batch(self):
        if self.training: self.f(self)

cases = dict(of_class=(OfClass, of_class), of_class_dict=(OfClassDict, of_class_dict), of_global=(OfGlobal, of_global),
    of_module=(OfModule, of_module), of_environment=(OfEnvironment, of_environment), of_own_class=(OfOwnClass, of_own_class),
    in_box=(Items, in_box, dict(after_item=Boxed)), of_collate=(Items, of_collate, dict(create_batch=True)),
    of_loader=(Items, of_loader, dict(dl_type=OwnLoader)))

def reset():
    global STEP
    STEP,CFG.p,CFG.by['p'],settings.p,OfOwnClass.p,box[0] = 0,0.,0.,0.,0.,0.
    os.environ.pop('FACTOR_OF_ITEMS', None)

def losses(items, change, kw={}, xla=True, cb=Changes, learner=Learner, loss=MSELossFlat):
    reset()
    collate,kw = Collates(),dict(kw)
    if 'create_batch' in kw: kw['create_batch'] = collate
    if 'after_item' in kw: kw['after_item'] = kw['after_item']()
    cls = kw.pop('dl_type', TfmdDL)
    dls = DataLoaders(*(cls(items(), bs=4, num_workers=0, **kw) for _ in range(2)))
    torch.manual_seed(0)
    learn = learner(dls, nn.Linear(4, 1), loss_func=loss(), opt_func=SGD, cbs=cb(change, collate) if cb else [])
    if xla: learn.to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2)
    return [float(o) for o in learn.recorder.losses],learn

def same(*args, **kwargs):
    (a,_),(b,learn) = losses(*args, xla=False, **kwargs),losses(*args, **kwargs)
    assert max(abs(x-y) for x,y in zip(a, b, strict=True)) < 1e-5
    return learn

@pytest.mark.parametrize('name', cases)
def test_a_change_after_each_batch(name): same(*cases[name])

class ChangingLearner(Learner):
    def one_batch(self, i, b):
        super().one_batch(i, b)
        of_class(self)
class ChangingLoss(nn.Module):
    def forward(self, p, t):
        CFG.p += .05
        return F.mse_loss(p, t)

def test_changed_by_the_learner(): same(OfClass, None, cb=None, learner=ChangingLearner)
def test_changed_by_the_loss(): same(OfClass, None, cb=None, loss=ChangingLoss)
def test_changed_by_a_schedule():
    def sched(pct):
        CFG.p = pct
        return 1e-2
    same(OfClass, sched, cb=lambda f, _: ParamScheduler(dict(lr=f)))

class Counts(Callback):
    def __init__(self, *args): self.n,self.seen = 0,[]
    def after_batch(self):
        self.n += 1
        self.seen.append(self.loss.detach())

@pytest.mark.parametrize('items,cb', [(OfClass, Counts), (OfClass, None), (Items, Changes)])
def test_what_touches_no_item_costs_no_reading_ahead(items, cb):
    def counts(cb): cb.n_done = getattr(cb, 'n_done', 0)+1
    assert same(items, counts, cb=cb).dls.train not in in_turn
