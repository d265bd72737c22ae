"What nobody hears of between two steps: what callbacks change of fastai's own, and what items share with what changes"
import ctypes, multiprocessing as mp
from functools import partial
import pytest
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.data import in_turn as made_in_turn
from unheard import *

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

@pytest.mark.parametrize('loss', [lambda bank, p, t: bank(p, t), lambda bank, p, t: bank.forward(p, t)], ids=['call', 'forward'])
def test_a_module_within_a_loss_changes_its_buffers_on_the_host(loss):
    "The attempt at a program has run its `forward`"
    def make():
        bank = Bank()
        class Outer(nn.Module):
            def forward(self, p, t): return loss(bank, p, t)
        learn = learner(loss_func=lambda p,t: outer(p, t))
        outer = Outer()
        learn.bank = bank
        return learn
    def fit(learn):
        learn.fit(2, .05)
        learn.seen = [int(learn.bank.at), *(round(float(v), 3) for v in learn.bank.kept)]
    compare(make, three, fit=fit)

def test_fastai_makes_an_item_after_the_first_batch_to_count_the_inputs():
    def make():
        n = [0]
        def count(xy):
            n[0] += 1
            return xy[0]*(1+n[0]/100),xy[1]
        dls = DataLoaders(*(TfmdDL(list(zip(*numbers(m, seed=m))), bs=8, num_workers=0, after_item=ItemTransform(count)) for m in (40, 16)))
        learn = learner(dls=dls)
        learn.n = n
        return learn
    def fit(learn):
        learn.fit(2, .05)
        learn.seen = learn.n
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
