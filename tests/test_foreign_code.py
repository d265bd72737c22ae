"What users and packages put in the place of a Learner's or a Recorder's methods does on XLA what it does on the CPU"
import pytest
from fastai.vision.all import *
from fastai_xla.all import *
from common import *
from on_both import *

def retraced_too(more): return ('auto', False) if more else ('auto',)   # not where the place of a method alone is another

# A `one_batch` in the place of the Learner's

def as_a_package_has_it(self, i, b):
    self.iter = i
    b_on_device = to_device(b, device=self.dls.device) if self.dls.device is not None else b
    self._split(b_on_device)
    self._with_events(self._do_one_batch, 'batch', CancelBatchException)

def halves_the_batch(self, i, b):
    self.iter = i
    self._split((b[0]*.5, b[1]))
    self._with_events(self._do_one_batch, 'batch', CancelBatchException)

def steps_twice(self, i, b):
    self.iter = i
    for _ in range(2):
        self._split(b)
        self._with_events(self._do_one_batch, 'batch', CancelBatchException)

def wraps(one_batch):
    def f(self, i, b):
        xb,yb = b
        return one_batch(self, i, (xb*.5, yb))
    return f

@pytest.mark.parametrize('name', ['one_batch', '_under_one_batch'])   # put there after this package is imported, and before
@pytest.mark.parametrize('f', [as_a_package_has_it, halves_the_batch, steps_twice, wraps])
def test_learner_class_has_another_one_batch(monkeypatch, f, name):
    if f is wraps: f = wraps(getattr(Learner, name))
    class Shifts(Transform):
        def encodes(self, x:TensorImage): return x+.1
    def make():
        data = image_dls(n=5*8, n_valid=2*8, bs=8, shuffle=False)
        for dl in data: dl.after_batch.add(Shifts())
        return Learner(data, mlp(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=SGD)
    monkeypatch.setattr(Learner, name, f)
    there = compare(make, fits, replays=retraced_too(name == 'one_batch'))
    if f is not steps_twice: assert not plain(there)
    if f is as_a_package_has_it: assert there.xla_report().per_batch('training')['executions'] == 1

# A `_do_one_batch` in the place of the Learner's

def does_a_batch(self):
    self.batches = getattr(self, 'batches', 0)+1
    self.pred = self.model(*self.xb)
    self('after_pred')
    self.loss_grad = self.loss_func(self.pred, *self.yb)*(1+self.batches%2)
    self.loss = self.loss_grad.clone()
    self('after_loss')
    if not self.training: return
    self.loss_grad.backward()
    self._with_events(self.opt.step, 'step', CancelStepException)
    self.opt.zero_grad()

def calls_fastais(self):
    self.batches = getattr(self, 'batches', 0)+1
    Learner._do_one_batch(self)

class Late(Callback):
    "Puts it there in the middle of a fit"
    def before_train(self): self.was = Learner._do_one_batch
    def after_batch(self):
        if self.training and self.iter == 2: Learner._do_one_batch = does_a_batch
    def after_train(self): Learner._do_one_batch = self.was

def learner_with(where, monkeypatch, f=does_a_batch, name='_do_one_batch'):
    "A function that makes one"
    kwargs = dict(opt_func=SGD, metrics=accuracy, loss_func=CrossEntropyLossFlat(), cbs=Late() if where == 'late' else None)
    if where == 'class': monkeypatch.setattr(Learner, name, f)
    cls = type('Mine', (Learner,), {name: f}) if where == 'subclass' else Learner
    def make():
        learn = cls(image_dls(n=5*8, n_valid=2*8, bs=8, shuffle=False), mlp(), **kwargs)
        if where == 'instance': setattr(learn, name, f.__get__(learn))
        return learn
    return make

@pytest.mark.parametrize('where,f', [*((o, does_a_batch) for o in ('class', 'subclass', 'instance')), ('subclass', calls_fastais)])
def test_another_do_one_batch_is_replayed(monkeypatch, where, f):
    "It runs at every step, here with a loss that is another in each second one"
    learn = compare(learner_with(where, monkeypatch, f), partial(fits, n=3), replays=retraced_too(where == 'subclass'))
    assert learn.batches == 3*(5+2) and not plain(learn)
    assert {phase for phase,_ in learn.xla_report().recorded} == {'training', 'validation'}
    assert learn.xla_report().per_batch('training')['executions'] == 1

def passed_by(learn, why='past `Learner._do_one_batch`'): return [n for k,n in plain(learn).items() if why in k]

def test_another_do_one_batch_is_replayed_where_it_comes_in_the_middle(monkeypatch):
    learn = compare(learner_with('late', monkeypatch), partial(fits, n=2))
    assert not plain(learn) and learn.batches == 2*2

def test_another_do_one_batch_and_several_steps_as_one(monkeypatch):
    "fastai's had run in its place, in silence"
    make = learner_with('subclass', monkeypatch)
    _,there = told(make, fits)
    with pytest.warns(UserWarning) as warned: learn,here = told(make, fits, True, replay=True, steps_per_execution=2)
    assert all(agree(there[k], here[k], 1e-4) for k in there) and learn.batches == 2*(5+2)
    assert not plain(learn) and learn.xla_report().recorded
    texts = [str(w.message) for w in warned]
    assert sum('Mine._do_one_batch' in t and 'one by one' in t for t in texts) == 1
    assert not any('are retraced' in t for t in texts)

def by_hand(self, i, b):
    self.iter = i
    self._split(b)
    self('before_batch')
    does_a_batch(self)
    self('after_batch')

others = as_a_package_has_it,halves_the_batch,steps_twice,wraps,by_hand

# an instance's own is not asked whether it is as fastai's
@pytest.mark.parametrize('f,where', [*((f, 'subclass') for f in others), *((f, 'instance') for f in others[1:])])
def test_a_learner_has_another_one_batch(monkeypatch, f, where):
    g = wraps(Learner.one_batch) if f is wraps else f
    learn = compare(learner_with(where, monkeypatch, g, 'one_batch'), fits, replays=retraced_too(where == 'subclass'))
    if f is by_hand: assert passed_by(learn, f"{type(learn).__name__}.one_batch (test_foreign_code.py, line ") == [2*(5+2)]
    elif f is not steps_twice: assert not plain(learn) and learn.xla_report().recorded

class Cancels(Callback):
    def before_batch(self):
        self.learn.loss = tensor(0.)
        if self.iter % 2: raise CancelBatchException

def test_batches_that_are_cancelled_are_not_counted(monkeypatch):
    learn = compare(lambda: learner(cbs=Cancels(), metrics=None), fits)
    assert not passed_by(learn)

# A recorder whose methods a package has put in the place of fastai's

def own_recorder(monkeypatch, prefix):
    "Metrics are kept under another name"
    def before_fit(self):
        for k in ('lrs', 'iters', 'losses', 'values'): setattr(self, k, [])
        self.held,self.metric_names = L(AvgMetric(m) if callable(m) else m for m in self.learn.metrics),L('epoch', 'held', 'time')
        self.smooth_loss.reset()
    def after_batch(self):
        for m in self.held: m.accumulate(self.learn)
        if not self.training: return
        self.lrs.append(self.opt.hypers[-1]['lr'])
        self.smooth_loss.accumulate(self.learn)
        self.losses.append(self.smooth_loss.value)
    for k in ('_train_mets', '_valid_mets'): monkeypatch.delattr(Recorder, k)
    def reset(self): self.held.map(Self.reset())
    def log(self): self.log += L(float(m.value) for m in self.held)
    def after_epoch(self): self.values.append(self.log[1:].copy())
    for k,f in dict(before_fit=before_fit, after_batch=after_batch, before_train=reset, before_validate=reset, after_train=log,
                    after_validate=log, after_epoch=after_epoch).items():
        monkeypatch.setattr(Recorder, prefix*hasattr(Recorder, f'_under_{k}')+k, f)

@pytest.mark.parametrize('prefix', ['', '_under_'])   # put there after this package is imported, and before
def test_recorder_keeps_its_metrics_elsewhere(monkeypatch, prefix):
    own_recorder(monkeypatch, prefix)
    learn = compare(lambda: learner(opt_func=SGD), fits, replays=retraced_too(not prefix))
    assert not plain(learn)
    assert [n for why,n in learn.xla_report().beside.items() if 'Recorder' in why] == [2*(5+2)]

class DoesAllByHand(Learner):
    "From the loop over batches on, as a published learner of detections"
    def all_batches(self):
        self.n_iter = len(self.dl)
        for i,b in enumerate(self.dl): self.one_batch(i, b)
    def one_batch(self, i, b):
        self.iter = i
        self._split(self._set_device(b))
        self._with_events(self._do_one_batch, 'batch', CancelBatchException)
    _do_one_batch = does_a_batch

def test_a_class_that_does_all_by_hand_is_told():
    "Batches are counted where the methods are not even asked by ours"
    learn = compare(lambda: DoesAllByHand(image_dls(n=5*8, n_valid=2*8, bs=8, shuffle=False), mlp(), loss_func=CrossEntropyLossFlat(),
                                          opt_func=SGD), fits)
    assert passed_by(learn) == [2*(5+2)] and any('DoesAllByHand._do_one_batch' in why for why in plain(learn))
