"""What nobody hears of: calls that fail and are caught, shapes and types that change in place, gradients that are taken away,
and hooks on the graph"""
from functools import partial
import pytest
from fastai.vision.all import *
from fastai_xla.all import *
from unheard import *

# Calls that fail

class Inverts(Counting):
    def change(self, h):
        a = torch.eye(6)*(1+.1*self.n)
        if self.n%4 == 0: a[2] = 0.
        try: w = torch.linalg.inv(a)
        except RuntimeError: w = torch.eye(6)/self.n
        return h@w.to(h.device)
class Indexes(Counting):
    def change(self, h):
        w = torch.tensor([1/self.n] if self.n%4 else 1/self.n)
        try: w = w[0]
        except IndexError: pass
        return h*w.to(h.device)

@pytest.mark.parametrize('model', [Inverts, Indexes])
def test_a_call_on_the_host_fails_and_is_caught(model):
    "Its tensors were counted among those that are sent, and a later step ended the fit"
    learn,told = compare(lambda: learner(model), default)
    assert not told and not plain(learn)

# Shapes and types

class Unsqueezes(Counting):
    def change(self, h):
        t = h.sum(0)
        t.unsqueeze_(0)
        return h*t/t.dim()
class Transposes(Counting):
    def change(self, h):
        t = h[:2].clone()
        t.t_()
        return h*t.shape[0]/10
class Sets(Counting):
    def change(self, h):
        t = h*1.
        t.data = t.data[:,:3]
        return h*t.shape[1]/10
class Out(Counting):
    def change(self, h):
        w = torch.empty(0, device=h.device)
        torch.square(h.detach(), out=w)
        return h*(1+w.shape[-1])/10
class Retains(Counting):
    def change(self, h):
        if not h.requires_grad: return h
        h.retain_grad()
        return h*(2 if h.retains_grad else 1)
class Classes(Counting):
    def change(self, h):
        t = h*1.
        scale = 1. if type(t) is Tensor else .5
        t.__class__ = TensorImage
        return h*scale

@pytest.mark.parametrize('model', [Unsqueezes, Transposes, Sets, Out, Retains, Classes])
def test_a_result_is_changed_in_place(model):
    "A replayed step said of it what it had been before"
    learn,told = compare(lambda: learner(model), default)
    assert not told and bool(plain(learn)) == (model is Classes)

class Turns(Counting):
    def __init__(self):
        super().__init__()
        self.register_buffer('w', torch.ones(6))
    def change(self, h):
        self.w.data = self.w.data.double() if self.w.dtype == torch.float32 else self.w.data.float()
        return h*self.w.float()

def test_a_buffer_has_another_type_in_each_step():
    "Which ended the process"
    learn,_ = compare(lambda: learner(Turns), default)
    assert any('changes the shape or the type' in why for why in plain(learn))

class Holds(Counting):
    def __init__(self):
        super().__init__()
        self.register_buffer('w', torch.ones(6))
    def change(self, h):
        self.old = self.w.data
        self.w.data = self.w.data+.1
        return h*self.w
class SumsOld(Callback):
    def before_fit(self): self.learn.seen = []
    def after_batch(self): self.learn.seen.append(round(float(self.model.old.sum()), 3))

def test_what_a_tensor_was_is_held():
    "It had the numbers of after the step"
    compare(lambda: learner(Holds, SumsOld()), default)

# Gradients that are taken away

class Two(nn.Module):
    both = True
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(5, 1),nn.Linear(5, 1)
    def forward(self, x): return self.a(x)+self.b(x) if self.both else self.a(x)
class Takes(Callback):
    def before_epoch(self): self.learn.model.both = self.epoch%2 == 0
class ZerosFirst(Takes):
    def before_batch(self): self.learn.model.zero_grad()
class ZerosLater(Takes):
    def after_pred(self): self.learn.model.zero_grad()
class SetsNone(Takes):
    def after_pred(self):
        for p in self.learn.model.parameters(): p.grad = None
class Deletes(Takes):
    def after_pred(self):
        for p in self.learn.model.parameters(): del p.grad

decaying = dict(opt_func=partial(SGD, mom=.9), wd=.3)
retraced = dict(replay=False)

@pytest.mark.parametrize('cb', [ZerosFirst, ZerosLater, SetsNone, Deletes])
def test_gradients_are_taken_away_before_the_backward_pass(cb):
    "The optimizer passes over what then gets none; it decayed"
    def make(): return learner(Two, cb(), **decaying)
    want = left(make)[1]
    # `p.grad = None` is not heard in retraced steps, as "What is not as on the CPU" tells
    for to in (default, three) if cb in (SetsNone, Deletes) else (default, retraced, three): compare(make, to, want)

def test_control_gradients_that_fastai_has_cleared_are_zeros():
    (_,(a,*_),_),(_,(b,*_),_) = (left(lambda: learner(Two, cb(), **decaying)) for cb in (Takes, ZerosFirst))
    assert max(abs(p-q) for p,q in zip(a, b)) > 1e-3

def test_gradients_are_taken_away_between_two_fits():
    def fit(learn):
        learn.fit(2, .05)
        learn.model.zero_grad()
        learn.freeze()
        learn.fit(2, .05)
    compare(lambda: learner(splitter=lambda m: L(params(m[0]), params(m[2])), **decaying), default, fit=fit)

class InTurns(Callback):
    "The body in even steps, the head in odd ones"
    def before_step(self):
        for p in self.model[2 if self.iter%2 else 0].parameters(): p.grad = None

def test_halves_of_a_model_are_trained_in_turns(): compare(lambda: learner(cbs=InTurns(), opt_func=Adam), default)

class Branches(Counting):
    def change(self, h):
        if not self.training: return h
        self.h = h.detach().clone().requires_grad_()
        return self.h*1.1 if self.n%3 == 0 else self.h
class Looks(Callback):
    def before_fit(self): self.learn.seen = []
    def after_batch(self):
        if self.training: self.learn.seen.append(round(float(self.model.h.grad.abs().mean()), 3))

def test_a_result_keeps_its_gradient_where_a_step_takes_another_path(): compare(lambda: learner(Branches, cbs=Looks()), default)

# --- hooks that are put on the graph

class OnGraph(Callback):
    "A hook of the user's, which a program leaves out: `seen` says how often it has run, and weights what it has done"
    def before_fit(self):
        self.n,self.hooks = 0,[]
        self.put(self.learn.model)
    def factor(self):
        self.n += 1
        return 1 + self.n%3
    def after_fit(self):
        for h in self.hooks: h.remove()
class OfModule(OnGraph):
    def put(self, m): self.hooks = [m[1].register_backward_hook(lambda m,i,o: tuple(g*self.factor() for g in i))]
class OfFastai(OnGraph):
    def put(self, m): self.hooks = [Hook(m[1], lambda m,i,o: self.factor(), is_forward=False)]
class OfLeaf(OnGraph):
    def put(self, m):
        self.leaf = m[2].weight.expand_as(m[2].weight).grad_fn.next_functions[0][0]
        self.hooks = [self.leaf.register_hook(self.scale)]
    def scale(self, *_):
        with torch.no_grad(): self.learn.model[2].weight.grad.mul_(self.factor())
class OfLeafBefore(OfLeaf):
    def put(self, m):
        super().put(m)
        self.after_fit()
        self.hooks = [self.leaf.register_prehook(lambda gs: tuple(g*self.factor() for g in gs))]

@pytest.mark.parametrize('cb', [OfModule, OfFastai, OfLeaf, OfLeafBefore])
def test_a_hook_on_the_graph(cb):
    "It ran where a step was traced, and not where it was replayed"
    def make(): return learner(cbs=cb())
    def fit(learn):
        learn.fit(2, .05)
        learn.seen = [cb.n for cb in learn.cbs if isinstance(cb, OnGraph)]
    want = left(make, fit=fit)[1]
    for to in (default, three) if cb in (OfModule, OfLeaf) else (default,):
        learn,_ = compare(make, to, want, fit=fit)
        assert learn.seen == [10] and plain(learn) and (to is three or any('backward pass' in why for why in plain(learn))), plain(learn)
