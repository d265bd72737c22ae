"""What nobody hears of: calls that fail and are caught, shapes and types that change in place, gradients that are taken away,
attributes of tensors, memory that two objects share, and what callbacks change of fastai's own between two steps"""
import ctypes, multiprocessing as mp, warnings
from collections import defaultdict, namedtuple
from functools import cached_property, partial
import pytest
from fastai.callback.all import *
from fastai.vision.all import *
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import spectral_norm
from fastai_xla.all import *
from fastai_xla.data import in_turn as made_in_turn

class Items:
    def __init__(self, xs, ys): self.xs,self.ys = xs,ys
    def __len__(self): return len(self.xs)
    def __getitem__(self, i): return self.xs[i].clone(),self.ys[i].clone()

def numbers(n=40, d=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    return x,(x[:,:2].prod(1)+x[:,2].sin())[:,None]

def data(train=None, valid=None):
    return DataLoaders.from_dsets(train or Items(*numbers()), valid or Items(*numbers(16, seed=1)), bs=8, num_workers=0, shuffle=False)

def mlp(): return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
def learner(model=None, cbs=None, dls=None, **kwargs):
    torch.manual_seed(0)
    return Learner(dls or data(), (model or mlp)(), **(dict(loss_func=MSELossFlat(), opt_func=SGD, cbs=cbs) | kwargs))

def left(make, to=None, fit=lambda l: l.fit_one_cycle(3, .1)):
    "Losses, weights and what `seen` holds after a fit, and warnings of it"
    learn = make()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        if to is not None: learn.to_xla(**to)
        with learn.no_bar(), learn.no_logging(): fit(learn)
    state = {k: v.detach().cpu().double() for k,v in learn.model.state_dict().items()}
    return learn,(list(map(float, learn.recorder.losses)), state, getattr(learn, 'seen', [])),[str(w.message) for w in told]

def compare(make, to, **kwargs):
    "As without XLA; the learner, and what was told"
    _,want,_ = left(make, **kwargs)
    learn,got,told = left(make, to, **kwargs)
    test_close(got[0], want[0], eps=1e-4)
    assert got[1].keys() == want[1].keys()
    for k in want[1]: torch.testing.assert_close(got[1][k], want[1][k], rtol=1e-3, atol=1e-4)
    assert str(got[2]) == str(want[2])
    return learn,told

def plain(learn): return dict(learn.xla_report().plain)

default,three = {},dict(steps_per_execution=3)
def in_turn(told): return sum('one by one' in t for t in told)

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.n = nn.Linear(5, 6),nn.Linear(6, 1),0
    def forward(self, x):
        self.n += 1
        return self.b(self.change(torch.tanh(self.a(x))))

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

heard = {'default': default, 'retraced': dict(replay=False), 'three': three}
# `p.grad = None` is not heard in retraced steps, as "What is not as on the CPU" tells
unheard = [('retraced', SetsNone), ('retraced', Deletes)]

taken = [(to, cb) for cb in (ZerosFirst, ZerosLater, SetsNone, Deletes) for to in heard if (to, cb) not in unheard]

@pytest.mark.parametrize('to,cb', taken)
def test_gradients_are_taken_away_before_the_backward_pass(to, cb):
    "The optimizer passes over what then gets none; it decayed"
    compare(lambda: learner(Two, cb(), **decaying), heard[to])

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

# Callbacks

class A(Callback):
    order = 5
    def after_pred(self): self.learn.pred = self.pred*.5
class B(Callback):
    order = 6
    def after_pred(self): self.learn.pred = self.pred+.1
class Reorders(Callback):
    def before_epoch(self): self.learn.a.order = 7 if self.epoch%2 else 5
def triples(self): self.learn.loss_grad = self.learn.loss_grad*3
class GetsEvent(Callback):
    def before_epoch(self):
        if self.epoch == 1: A.after_loss = triples
    def after_fit(self): del A.after_loss

@pytest.mark.parametrize('cb', [Reorders, GetsEvent])
def test_callbacks_have_another_order_or_event_within_a_fit(cb): compare(lambda: learner(cbs=[A(), B(), cb()]), default)

def test_weights_that_somebody_holds_are_no_alarm():
    def fit(learn):
        learn.fit(2, .05)
        held = learn.model.state_dict()
        learn.fit(2, .05)
        assert held
    learn,told = compare(learner, default, fit=fit)
    assert not told and any('holds an alias' in why for why in plain(learn))

# Items that a callback or the fit changes

class Decays(Callback):
    def __init__(self, held): self.held = held
    def after_batch(self):
        if self.training: self.held *= .95

def of_rows():
    x,y = numbers()
    return learner(cbs=Decays(y), dls=data(list(zip(x, y))))
def of_numpy():
    x,y = numbers()
    held = y.numpy().copy()
    return learner(cbs=Decays(held), dls=data(Items(x, torch.from_numpy(held))))
class Level:
    __slots__ = 'v'.split()
    def __init__(self): self.v = 0.
    def advance(self): self.v += .05
class Lifts(Callback):
    def __init__(self, step): self.step = step
    def after_batch(self):
        if self.training: self.step()
class Fills(Callback):
    def __init__(self, box): self.box = box
    def after_batch(self):
        if self.training: self.box[0] = self.train_iter/20
class Levels(Items):
    def __init__(self, f):
        super().__init__(*numbers())
        self.f = f
    def __getitem__(self, i): return self.xs[i]*(1+self.f()),self.ys[i]
def of_slots():
    "A method of the object here, and its attribute there"
    level = Level()
    return learner(cbs=Lifts(level.advance), dls=data(Levels(partial(getattr, level, 'v'))))
class OfArray(Items):
    def __init__(self, diff):
        super().__init__(*numbers())
        self.diff = diff
    def __getitem__(self, i): return self.xs[i]*(1+self.diff[0]),self.ys[i]
def of_array():
    shared = mp.Array(ctypes.c_double, 1)
    return learner(cbs=Fills(shared), dls=data(OfArray(shared)))
held = {}
def of_progress():
    held['learn'] = None
    learn = learner(dls=data(Levels(lambda: getattr(held['learn'], 'pct_train', 0.))))
    held['learn'] = learn
    return learn

@pytest.mark.parametrize('make', [of_rows, of_numpy, of_slots, of_array, of_progress])
@pytest.mark.parametrize('to', [default, three], ids=['default', 'three'])
def test_items_share_what_changes(make, to):
    _,told = compare(make, to)
    assert in_turn(told) == len(told) == len(to)

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

# With several steps as one

class Steps(Callback):
    def before_fit(self): self.learn.seen = []
    def after_batch(self):
        if self.training: self.each()
class Saves(Steps):
    def each(self):
        if self.train_iter%4: return
        self.learn.save('unheard')
        sd = torch.load(self.learn.path/self.learn.model_dir/'unheard.pth', weights_only=False)
        self.learn.seen.append(round(float((sd['model'] if 'model' in sd else sd)['0.weight'].sum()), 2))
class Freezes(Steps):
    def each(self):
        if self.train_iter == 5: self.learn.freeze_to(-1)
        if self.train_iter == 10: self.learn.unfreeze()
class CountsOn(Steps):
    def each(self): self.learn.train_iter += 1
    def after_pred(self): self.learn.pred = self.pred*(1+.1*self.train_iter)
class Skips(Steps):
    def each(self): self.learn.pct_train += .01
class Clips(Steps):
    def each(self): self.learn.gradient_clip.max_norm *= .9
class Smooths(Steps):
    order = 70   # after the recorder
    def each(self): self.learn.recorder.smooth_loss.beta = .5
class SmoothsBefore(Callback):
    def after_batch(self): self.learn.recorder.smooth_loss.beta = .5 if self.learn.iter%2 else .9
gains = {}
class SetsItem(Steps):
    def __init__(self): self.note = gains.__setitem__
    def before_fit(self):
        super().before_fit()
        gains['now'] = 1.
    def each(self): self.note('now', gains['now']*1.1)
    def after_pred(self): self.learn.pred = self.pred*gains['now']
class ByKey(Steps):
    def before_fit(self):
        super().before_fit()
        self.slow = {p: p.detach().clone() for p in self.model.parameters()}
    def each(self):
        with torch.no_grad():
            for p,s in self.slow.items(): p.lerp_(s, .1)
class Copier:
    __slots__ = 'p seen'.split()
    def __init__(self, p, seen): self.p,self.seen = p,seen
    def copy(self): self.seen.append(round(float(self.p.sum()), 2))
class BySlots(Steps):
    def before_fit(self):
        super().before_fit()
        self.copier = Copier(self.model[0].bias, self.learn.seen)
    def each(self): self.copier.copy()

@pytest.mark.parametrize('cb', [Saves, Freezes, CountsOn, Skips, Clips, Smooths, SetsItem, ByKey, BySlots])
def test_between_two_steps_a_callback_changes_or_looks_at(cb, tmp_path):
    splitter = lambda m: L(params(m[0]), params(m[2]))
    def make(): return learner(cbs=[cb(), *([GradientClip(1.)] if cb is Clips else [])], splitter=splitter, path=tmp_path)
    _,told = compare(make, three)
    assert in_turn(told) == 1, told

class ByRate(Transform):
    order = 99
    def encodes(self, o:tuple): return o[0]*(1+self.learn.opt.hypers[0]['lr']),o[1]

def test_a_batch_transform_reads_what_is_another_in_each_step():
    def make():
        tfm = ByRate()
        dls = data()
        for dl in dls.loaders: dl.after_batch = Pipeline([tfm])
        tfm.learn = learner(dls=dls)
        return tfm.learn
    _,told = compare(make, three)
    assert in_turn(told) == 1, told

def test_the_recorders_average_is_set_before_it_counts(): compare(lambda: learner(cbs=SmoothsBefore()), default)

class Moves(Metric):
    def reset(self): self.n = 0
    def accumulate(self, learn):
        self.n += 1
        learn.model.rate = 1+.1*self.n
    @property
    def value(self): return self.n
class Rated(Counting):
    rate = 1.
    def change(self, h): return h*self.rate

def test_a_metric_changes_the_model_while_it_accumulates():
    _,told = compare(lambda: learner(Rated, metrics=Moves()), three)
    assert in_turn(told) == 1, told

class Bank(nn.Module):
    "A loss that keeps predictions in buffers on the host"
    def __init__(self):
        super().__init__()
        self.register_buffer('kept', torch.zeros(16, 1))
        self.register_buffer('at', torch.zeros(1, dtype=torch.long))
    def forward(self, p, t):
        i = int(self.at)
        if p.requires_grad:
            self.kept[i:i+8] = p.detach()
            self.at[0] = (i+8)%16
        return F.mse_loss(p, t)+.1*(p.mean()-self.kept.to(p.device)).pow(2).mean()

def test_a_module_within_a_loss_changes_its_buffers_on_the_host():
    "The attempt at a program has run its `forward`"
    def make():
        bank = Bank()
        learn = learner(loss_func=lambda p,t: bank(p, t))
        learn.bank = bank
        return learn
    def fit(learn):
        learn.fit(2, .05)
        learn.seen = [int(learn.bank.at), *(round(float(v), 3) for v in learn.bank.kept)]
    compare(make, three, fit=fit)

class Fit: learn = SimpleNamespace(iter=0)
class Counted(Items):
    def __getitem__(self, i): return self.xs[i]*(1+.1*self.n()),self.ys[i].clone()
class AsAttribute(Counted):
    def n(self): return Fit.learn.iter
class ByName(Counted):
    def n(self): return getattr(Fit.learn, 'iter', 0)
class Builtin(Counted):
    def n(self): return next(iter([1]))

@pytest.mark.parametrize('to', [default, three], ids=['default', 'three'])
@pytest.mark.parametrize('cls', [AsAttribute, ByName, Builtin])
def test_items_depend_on_the_number_of_the_batch(cls, to):
    "They were made before it was another"
    def make():
        Fit.learn = learner(dls=data(cls(*numbers()), cls(*numbers(16, seed=1))))
        Fit.learn.iter = 0
        return Fit.learn
    learn,_ = compare(make, to)
    assert (learn.dls.train in made_in_turn) == (cls is not Builtin)

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

@pytest.mark.parametrize('to', [default, three], ids=['default', 'three'])
@pytest.mark.parametrize('cb', [OfModule, OfFastai, OfLeaf, OfLeafBefore])
def test_a_hook_on_the_graph(cb, to):
    "It ran where a step was traced, and not where it was replayed"
    def fit(learn):
        learn.fit(2, .05)
        learn.seen = [cb.n for cb in learn.cbs if isinstance(cb, OnGraph)]
    learn,_ = compare(lambda: learner(cbs=cb()), to, fit=fit)
    assert learn.seen == [10] and plain(learn) and (to is three or any('backward pass' in why for why in plain(learn))), plain(learn)

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

@pytest.mark.parametrize('to', [default, three], ids=['default', 'three'])
@pytest.mark.parametrize('place', places)
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
