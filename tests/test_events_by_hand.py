"Callbacks that hear every event, events and batches by hand, and gradients between two steps: on XLA as on the CPU"
import contextlib, io
import pytest
from fastai.vision.all import *
from fastai.test_utils import VerboseCallback
from fastai_xla.all import *
from on_both import *

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
    assert not plain(learn)   # it runs at every step
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

def test_batch_by_hand_of_a_learner_that_has_never_had_a_dataloader():
    "What `fit` sets is set by hand, but no `learn.dl`; the callbacks, which count, are away"
    def story(learn):
        learn.cbs = L()
        learn.training,learn.loss = True,tensor(0.)
        learn.create_opt()
        learn.model.train()
        for i in range(3): learn.one_batch(i, learn.dls.train.one_batch())
        return learn.loss
    compare(learner, story)

# Gradients between two steps

class ReadsGrads(Callback):
    "Reads gradients at `when`, by itself or through a function"
    def __init__(self, when):
        self.seen = []
        setattr(self, when, self._read)
    def _read(self):
        if self.training: self.seen.append([None if p.grad is None else p.grad.abs().max().cpu() for p in self.learn.model.parameters()])

@pytest.mark.parametrize('when', ['before_batch', 'after_pred', 'after_backward', 'after_step',
                                  'after_batch', 'after_train', 'after_fit'])
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
