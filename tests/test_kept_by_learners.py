"What a learner, its recorder and its metrics keep while a step is traced, and where a callback ends a pass: as on the CPU"
from collections import Counter, defaultdict
import pytest
from fastai.vision.all import *
from fastai_xla.all import *
from on_both import agree, compare, fits, learner, told

def on_xla(there, make, story=fits, **to):
    "With `to`, the same comes out as `there` on the CPU; what does"
    _,here = told(make, story, True, **to)
    other = [k for k in {**there, **here} if k not in there or k not in here or not agree(there[k], here[k], 1e-4)]
    assert not other, [(k, there.get(k), here.get(k)) for k in other[:4]]
    return here

three = dict(steps_per_execution=3)

# a step that is traced, and then refused, has counted nothing

class Counts(Learner):
    "Scales its gradients by how many there have been"
    def _backward(self):
        self.seen['n'] = self.seen.get('n', 0) + 1
        (self.loss_grad/(1+.2*self.seen['n'])).backward()

class Adds(Counts):
    def _backward(self):
        self.seen['n'] += 1
        (self.loss_grad/(1+.2*self.seen['n'])).backward()

class Hears(Learner):
    def __call__(self, event):
        if event == 'after_pred': self.seen[event] = self.seen.get(event, 0) + 1
        return super().__call__(event)

def of(cls, kind):
    def make():
        learn = learner()
        learn.__class__,learn.seen = cls,kind()
        return learn
    return make

def seen(learn): return fits(learn),dict(learn.seen)

kinds = [(Counts, dict), (Adds, Counter), (Adds, partial(defaultdict, int)), (Hears, dict)]

@pytest.mark.parametrize('cls,kind', kinds)
def test_a_count_in_a_dict_of_the_learner(cls, kind):
    _,there = told(of(cls, kind), seen)
    for to in ({}, three): on_xla(there, of(cls, kind), seen, **to)

@pytest.mark.parametrize('cls,kind', kinds[:3])
def test_by_guards(cls, kind, recorded): compare(of(cls, kind), seen, replays=('auto',))

# the recorder, which notes a batch after its step

class ByNotes(Callback):
    def __init__(self, f): self.f = f
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad*self.f(self)

@pytest.mark.parametrize('f', [lambda cb: 1/(1+.2*len(cb.recorder.losses)), lambda cb: 1+len(cb.recorder.lrs),
    lambda cb: float(cb.recorder.losses[-1]) if cb.recorder.losses else 1.], ids=['losses', 'lrs', 'the last'])
def test_a_step_that_reads_what_the_recorder_has_noted(f):
    make = lambda: learner(cbs=ByNotes(f))
    _,there = told(make, fits)
    on_xla(there, make)
    with pytest.warns(UserWarning, match='look at what the recorder has noted of the one before it'): on_xla(there, make, **three)

# keys and lists

class Norms(Callback):
    def before_fit(self): self.norms = {}
    def after_backward(self):
        for n,p in self.model.named_parameters(): self.norms[n] = self.norms.get(n, 0.) + p.grad.norm()

def test_keys_come_in_the_order_of_the_step():
    def story(learn): return fits(learn),list(learn.norms.norms)
    make = lambda: learner(cbs=Norms())
    _,there = told(make, story)
    for to in ({}, three): on_xla(there, make, story, **to)

class Logs(Metric):
    "To a list that it is given"
    def __init__(self, log): self.log = log
    def accumulate(self, learn): self.log.append((learn.pred.argmax(1) == learn.y).float().mean())
    @property
    def value(self): return float(sum(self.log))

def test_a_list_that_a_metric_is_given_stays_the_list():
    def make():
        log = []
        learn = learner(metrics=Logs(log))
        learn.log_of_mine = log
        return learn
    def story(learn): return fits(learn),list(map(float, learn.log_of_mine))
    compare(make, story)

# a pass that a callback ends

class Ends(Callback):
    "Reads a value, so that steps are traced, and ends the second validation"
    def before_batch(self):
        if self.training and float(self.y.float().mean()) > 1.9: raise CancelBatchException
    def after_batch(self):
        if not self.training and self.epoch == 1: raise CancelValidException

def test_the_training_loss_goes_on_after_a_validation_that_was_ended():
    make,story = lambda: learner(cbs=Ends()),partial(fits, n=4)
    _,there = told(make, story)
    for to in ({}, three):
        losses = [float(v) for k,v in on_xla(there, make, story, **to).items() if k.startswith('.losses')]
        assert len({*losses[-5:]}) == 5, losses
