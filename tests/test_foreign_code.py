"What users write around a Learner does on XLA what it does on the CPU"
import contextlib, io, os, warnings
os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'   # short compiles; nothing here is timed
import pytest, torch
from fastai.vision.all import *
from fastai.callback.all import *
from fastai.test_utils import VerboseCallback
from fastai_xla.all import *
from fastai_xla.runtime import fetch, manual_seed
from common import *

def mlp(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4))
def learner(**kwargs):
    kwargs = dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy) | kwargs
    return Learner(image_dls(n=5*8, n_valid=2*8, bs=8, shuffle=False), mlp(), **kwargs)

def leaves(o, at=''):
    "(where, tensor or other thing) for all that is in `o`"
    if isinstance(o, dict): return [l for k,v in o.items() for l in leaves(v, f'{at}.{k}')]
    if isinstance(o, (list, tuple, L)): return [l for i,v in enumerate(o) for l in leaves(v, f'{at}.{i}')]
    return [(at, fetch(o.detach()).float() if isinstance(o, torch.Tensor) else o)]

def told(make, story, on_xla=False, **kwargs):
    "What `story` returns for the learner, its losses, its metrics and its weights"
    set_seed(0)
    manual_seed(0)
    learn = make()
    if on_xla: learn.to_xla(**kwargs)
    with learn.no_logging(), learn.no_bar(): res = story(learn)
    rec = learn.recorder
    return learn,dict(leaves(dict(told=res, losses=list(getattr(rec, 'losses', [])), values=list(map(list, getattr(rec, 'values', []))), weights=dict(learn.model.state_dict()))))

def agree(a, b, tol):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor): return a.shape == b.shape and torch.allclose(a, b, rtol=tol, atol=tol/10)
    return type(a) == type(b) and (a == pytest.approx(b, rel=tol, abs=tol/10) if isinstance(a, float) else a == b)

def compare(make, story, tol=1e-4, replays=('auto', False)):
    "On the CPU and on XLA, replayed and not, the same comes out; the learner that replayed"
    learners,(_,there) = [],told(make, story)
    for replay in replays:
        learn,here = told(make, story, True, replay=replay)
        other = [k for k in {**there, **here} if k not in there or k not in here or not agree(there[k], here[k], tol)]
        assert not other, f"replay={replay}: {[(k, there.get(k), here.get(k)) for k in other[:4]]} and {len(other)} in all"
        learners.append(learn)
    return learners[0]

def plain(learn): return dict(learn.xla_report().plain)
def fits(learn, n=2): learn.fit(n, 1e-2)

# Callbacks that hear every event

class Hears(Callback):
    "Notes each event that it hears"
    def __init__(self): self.heard = []
    def __call__(self, event_name):
        self.heard.append(event_name)
        super().__call__(event_name)

class Halves(Callback):
    "Acts on an event of the step by `__call__` alone"
    def __call__(self, event_name):
        if event_name == 'after_loss' and self.training: self.learn.loss_grad = self.learn.loss_grad/2
        super().__call__(event_name)

def test_callback_with_a_call_of_its_own_hears_every_event():
    def story(learn):
        fits(learn)
        return learn.hears.heard
    learn = compare(lambda: learner(cbs=Hears()), story)
    assert sum(plain(learn).values()) == 2*(5+2)
    assert learn.hears.heard.count('after_step') == 2*5

def test_verbose_callback_of_fastai_prints_every_event():
    def story(learn):
        out = io.StringIO()
        with contextlib.redirect_stdout(out): fits(learn)
        return out.getvalue()
    learn = compare(lambda: learner(cbs=VerboseCallback()), story)
    assert 'VerboseCallback hears every event' in first(plain(learn))

def test_callback_that_acts_within_the_step_by_call_alone_is_replayed():
    learn = compare(lambda: learner(cbs=Halves(), opt_func=SGD), fits)
    assert not plain(learn)

# Events and batches by hand

def look_at_mixup(learn):
    "As fastai's documentation does; the numbers drawn"
    learn.epoch,learn.training = 0,True
    learn.dl = learn.dls.train
    b = learn.dls.one_batch()
    with learn:
        learn._split(b)
        learn('before_train')
        set_seed(7)
        learn('before_batch')
        learn('after_train')
        return learn.mix_up.x,learn.mix_up.lam

@pytest.mark.parametrize('fit_before', [False, True])
def test_mixup_is_looked_at_by_events_called_by_hand(fit_before):
    "MixUp draws on the device, so its draws are its own"
    def story(learn):
        if fit_before: fits(learn, 1)
        res = look_at_mixup(learn)
        fits(learn, 1)
        return [tuple(o.shape) for o in res]
    _,there = told(lambda: learner(cbs=MixUp(.5)), story)
    for replay in ('auto', False):
        _,here = told(lambda: learner(cbs=MixUp(.5)), story, True, replay=replay)
        assert {k: v for k,v in here.items() if k.startswith('.told')} == {k: v for k,v in there.items() if k.startswith('.told')}

def test_batches_by_hand_after_a_fit():
    "`_do_one_batch` on a batch that the user has split, and `one_batch` in a loop of the user's"
    def story(learn):
        fits(learn)
        learn.training,learn.dl = True,learn.dls.train
        learn.model.train()
        losses = []
        for b in learn.dls.train:
            learn._split(b)
            learn._do_one_batch()
            losses.append(learn.loss.item())
        for i,b in enumerate(learn.dls.train):
            learn.one_batch(i, b)
            losses.append(learn.loss.item())
        fits(learn, 1)
        return losses
    compare(learner, story)

# The loss that the backward pass starts from

class Scales(Callback):
    def __init__(self): self.seen = []
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad*3
    def after_batch(self): self.seen.append((float(self.learn.loss_grad), float(self.learn.loss)))

def test_loss_grad_of_a_replayed_batch_is_what_the_backward_pass_started_from():
    def story(learn):
        fits(learn)
        return learn.scales.seen
    learn = compare(lambda: learner(cbs=Scales()), story)
    assert not plain(learn)
    assert all(g == pytest.approx(3*l, rel=1e-5) for g,l in learn.scales.seen)

# Gradients between two steps

class ReadsGrads(Callback):
    "Reads gradients at `when`, by itself or through a function"
    def __init__(self, when):
        self.seen = []
        setattr(self, when, self._read)
    def _read(self):
        if self.training: self.seen.append([None if p.grad is None else p.grad.abs().max().cpu() for p in self.learn.model.parameters()])

@pytest.mark.parametrize('when', ['before_batch', 'after_pred', 'before_backward', 'after_backward', 'after_step', 'after_batch', 'after_train', 'after_fit'])
def test_gradients_are_fastais_at_every_event(when):
    "Zeros after `zero_grad`, not `None`"
    def story(learn):
        learn.fit(1, 1e-2)
        learn.fit(1, 1e-2)
        return learn.reads_grads.seen
    compare(lambda: learner(cbs=ReadsGrads(when)), story)

def norm_of_grads(model): return sum(p.grad.norm() for p in model.parameters())

def test_a_replayed_step_stays_one_execution_with_a_callback_that_reads_zeros():
    "The callback is a function, and another function of the user's reads the gradients"
    norms = []
    def story(learn):
        fits(learn)
        return [o.cpu() for o in norms]
    def reads(self): norms.append(norm_of_grads(self.learn.model).detach())
    def make():
        norms.clear()
        return learner(cbs=Callback(after_batch=reads))
    learn = compare(make, story)
    assert not plain(learn)
