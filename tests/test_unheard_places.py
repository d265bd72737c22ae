"What nobody hears of: what a library's code depends on, and the places where a model or a loss keeps what it changes"
from collections import defaultdict, namedtuple
from functools import cached_property, partial
import pytest
from fastai.vision.all import *
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import spectral_norm
from fastai_xla.all import *
from unheard import *

# What a library's code depends on

class Cached(Counting):
    def __init__(self):
        super().__init__()
        self.c = spectral_norm(nn.Linear(6, 6), n_power_iterations=1)
    def change(self, h):
        with parametrize.cached(): return self.c(torch.tanh(self.c(torch.tanh(self.c(h)))))

def test_a_parametrization_is_kept_for_a_while():
    learn,told = compare(lambda: learner(Cached), default)
    assert not told and not plain(learn)

class Prunes(Callback):
    def after_step(self):
        if self.train_iter%5 == 2: prune.l1_unstructured(self.learn.model[0], 'weight', amount=.1)

@pytest.mark.parametrize('to', [default, three], ids=['default', 'three'])
def test_a_layer_is_pruned_within_a_step(to): compare(lambda: learner(cbs=Prunes()), to)

class Gains(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.gain = w.gain
        return x@w.t()*w.gain
    @staticmethod
    def backward(ctx, g):
        x,w = ctx.saved_tensors
        return g@w*ctx.gain,g.t()@x*ctx.gain
rates = dict(rate=1.)
class Scales(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.rate = rates['rate']
        ctx.save_for_backward(output)
class Inherits(Scales):
    @staticmethod
    def forward(x): return torch.tanh(x)
    @staticmethod
    def backward(ctx, g):
        y, = ctx.saved_tensors
        return g*(1-y*y)*ctx.rate
class OfParameter(Counting):
    def change(self, h):
        self.b.weight.gain = 1/(1+.1*self.n)
        return h*Gains.apply(h, self.b.weight)
class OfResult(Counting):
    def change(self, h):
        w = self.b.weight*1.
        w.gain = 1/(1+.1*self.n)
        return h*Gains.apply(h, w)
class ByContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x*1.
    @staticmethod
    def backward(ctx, g): return g*type(ctx)._forward_cls.rate
class OfContext(Counting):
    def change(self, h):
        ByContext.rate = 1/(1+.1*self.n)
        return ByContext.apply(h)
class OfGlobal(Counting):
    def change(self, h):
        rates['rate'] = 1/(1+.3*self.n)
        return Inherits.apply(h)
class Place:
    i = 0
    def __index__(self): return self.i
class OfIndex(Counting):
    def __init__(self):
        super().__init__()
        self.place = Place()
    def change(self, h):
        self.place.i = self.n//4%6
        return h*(1+h[:,self.place][:,None])
text = '''
import torch
from torch import nn
scale = 1.
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 6)
    def forward(self, x): return torch.tanh(self.l(x))*scale
'''
class Executed(Counting):
    def __init__(self):
        super().__init__()
        self.names = {}
        exec(text, self.names)
        self.c = self.names['Scaled']()
    def change(self, h):
        self.names['scale'] = 1+.1*self.n
        return self.c(h)

@pytest.mark.parametrize('model', [OfParameter, OfResult, OfContext, OfGlobal, OfIndex, Executed])
def test_code_that_nobody_sees_reads_what_changes(model):
    _,told = compare(lambda: learner(model), default)
    assert not told

def test_lazy_layers_are_an_error():
    learn = learner(lambda: nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(1)))
    with pytest.raises(ValueError, match='has no shape yet'): learn.to_xla()
    learn.model(learn.dls.one_batch()[0])
    learn.to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)

# --- what a step changes, and where it may be

def bumped(b):
    b[0] += 1
    return float(b[0])
class Held(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held
    def forward(self, p, t): return F.mse_loss(p, t)*(1+.05*bumped(self.inner(self.held)))
def kept_in(make, inner):
    class Of(Held): pass
    Of.inner = staticmethod(inner)
    return lambda: Of(make())
def by_default(make):
    def make_loss():
        def f(p, t, b=make()): return F.mse_loss(p, t)*(1+.05*bumped(b))
        return f
    return make_loss
def by_partial(make): return lambda: partial(lambda p,t,b: F.mse_loss(p, t)*(1+.05*bumped(b)), b=make())
def by_scope(make, inner):
    def make_loss():
        b = make()
        return lambda p,t: F.mse_loss(p, t)*(1+.05*bumped(inner(b)))
    return make_loss
def by_method(make):
    def make_loss():
        def add(b=make()): b.__setitem__(0, b[0]+1)
        def f(p, t):
            add()
            return F.mse_loss(p, t)*(1+.05*float(add.__defaults__[0][0]))
        return f
    return make_loss

class Caches:
    @cached_property
    def b(self): return [0]

Pair = namedtuple('Pair', 'a b')
def one(): return [0]
def array_of(): return np.zeros(1)
def first_of(b): return b[0]
places = dict(default=by_default(one), default_array=by_default(array_of), default_tensor=by_default(lambda: torch.zeros(1)),
    partial=by_partial(one), method=by_method(one), attribute=kept_in(one, noop), nested=kept_in(lambda: [[0]], first_of),
    in_tuple=kept_in(lambda: ([0],), first_of), array_in_tuple=kept_in(lambda: (array_of(),), first_of),
    in_namedtuple=kept_in(lambda: Pair([0], 1), first_of), tensor_in_list=kept_in(lambda: [torch.zeros(1)], first_of),
    scope=by_scope(one, noop), scope_nested=by_scope(lambda: {'a': [0]}, lambda b: b['a']), scope_tuple=by_scope(lambda: ([0],), first_of),
    cached=by_scope(Caches, lambda o: o.b))

# by default such a step is logged: its loss runs at each one, wherever the count is
logged = [(place, default) for place in ('default', 'default_tensor', 'attribute', 'cached')]
def name_of(o): return o if isinstance(o, str) else 'three' if o else 'default'

@pytest.mark.parametrize('place,to', [*((place, three) for place in places), *logged], ids=name_of)
def test_where_a_loss_keeps_count(place, to):
    "The attempt at several steps as one had counted, and was not undone"
    compare(lambda: learner(loss_func=places[place]()), to)

@pytest.mark.parametrize('make', [partial(defaultdict, list), lambda: ([1, 2],), partial(Pair, [1], 2)], ids=['dict', 'tuple', 'named'])
@pytest.mark.parametrize('of', ['model', 'loss'])
def test_an_attribute_that_nobody_changes(make, of):
    "It ended the fit"
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = make()
        def forward(self, p, t): return F.mse_loss(p, t)
    def make_learner():
        learn = learner(loss_func=Loss() if of == 'loss' else MSELossFlat())
        learn.model.held = make()
        return learn
    _,told = compare(make_learner, three)
    assert not in_turn(told)

class OfClass(nn.Module):
    n = 0
    def forward(self, p, t):
        type(self).n += 1
        return F.mse_loss(p, t)*(1+.05*self.n)
class ByHook(nn.Module):
    "A hook that the next step runs"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(5, 6),nn.Linear(6, 1)
    def forward(self, x):
        res = self.b(self.a(x).tanh())
        if self.training: h = self.a.register_forward_hook(lambda m,i,o: (h.remove(), o*1.5)[1])
        return res

def test_a_class_keeps_count():
    def make():
        class Loss(OfClass): pass
        return learner(loss_func=Loss())
    _,told = compare(make, three)
    assert in_turn(told) == 1, told

@pytest.mark.parametrize('to', [default, three], ids=['default', 'three'])
def test_a_step_leaves_a_hook_to_the_next(to):
    learn,_ = compare(lambda: learner(ByHook), to)
    assert any('a hook of a module comes or goes within the step' in why for why in plain(learn)) == (to is three), plain(learn)

class Duel(Learner):
    "Two networks with an optimizer each; a callback reads their losses, each of which is a part of the step"
    def __init__(self, dls, **kwargs):
        self.dis,self.gen = mlp(),nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5))
        super().__init__(dls, nn.ModuleDict(dict(d=self.dis, g=self.gen)), loss_func=noop, opt_func=SGD, **kwargs)
    def create_opt(self):
        self.of_gen,self.of_dis = (self.opt_func([list(m.parameters())], lr=self.lr) for m in (self.gen, self.dis))
        self.opt = self.of_gen
    def train_one(self, opt, loss):
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()
    def _do_one_batch(self):
        x = self.xb[0]
        self.loss = self.pred = self.dis(x).mean()
        if not self.training: return
        with torch.no_grad(): made = self.gen(x[:,:3])
        self.loss_of_dis = self.train_one(self.of_dis, F.softplus(-self.dis(x)).mean() + F.softplus(self.dis(made)).mean())
        self.loss = self.train_one(self.of_gen, F.softplus(-self.dis(self.gen(x[:,:3]*.5))).mean())
class ReadsLosses(Callback):
    def before_fit(self): self.learn.seen = []
    def after_batch(self):
        if self.training: self.learn.seen.append(f'{self.learn.loss.item():.3f} {self.learn.loss_of_dis.item():.3f}')

def test_parts_of_a_step_are_read_after_it():
    "Each step was retraced: its first trace is another than those that follow"
    def make():
        torch.manual_seed(0)
        return Duel(data(), cbs=ReadsLosses())
    learn,_ = compare(make, default, fit=lambda l: l.fit(3, .05))
    assert not plain(learn) and learn.xla_report().per_batch()['executions'] == 1, plain(learn)
