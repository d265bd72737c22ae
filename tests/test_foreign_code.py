"What users write around a Learner does on XLA what it does on the CPU"
import contextlib, io, os, subprocess, sys, warnings
import pytest, torch
from fastai.vision.all import *
from fastai.callback.all import *
from fastai.test_utils import VerboseCallback
from fastai_xla.all import *
from fastai_xla.runtime import device, is_xla
from fastai_xla.seeds import manual_seed
from fastai_xla.transfer import fetch
from torch.utils.data import TensorDataset
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
    return learn,dict(leaves(dict(told=res, losses=list(getattr(rec, 'losses', [])),
                                  values=list(map(list, getattr(rec, 'values', []))), weights=dict(learn.model.state_dict()))))

def agree(a, b, tol):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=tol, atol=tol/10)
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

@pytest.mark.parametrize('when', ['before_batch', 'after_pred', 'before_backward', 'after_backward',
                                  'after_step', 'after_batch', 'after_train', 'after_fit'])
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

# Hidden state

def sequences(odd=0):
    "Batches of 8 sequences; the last one of each pass has `odd`, where that is not 0"
    g = torch.Generator().manual_seed(0)
    def items(n):
        x = torch.randint(10, (n+odd, 5), generator=g)
        return list(zip(x, (x+1)%10))
    return DataLoaders.from_dsets(items(4*8), items(2*8), bs=8, shuffle=False, drop_last=not odd, num_workers=0)

class Recurrent(nn.Module):
    "A state that is 0 first, and then a tensor"
    def __init__(self, h=0):
        super().__init__()
        self.emb,self.hidden,self.out,self.h = nn.Embedding(10, 8),nn.Linear(8, 8),nn.Linear(8, 10),h
    def forward(self, x):
        outs = []
        for i in range(x.shape[1]):
            self.h = F.relu(self.hidden(self.h + self.emb(x[:,i])))
            outs.append(self.out(self.h))
        self.h = self.h.detach()
        return torch.stack(outs, dim=1)

class Resets(Recurrent):
    def reset(self): self.h = 0

class Sized(Recurrent):
    "A state of each batch's size"
    def reset(self): self.h = None
    def forward(self, x):
        if self.h is None or len(self.h) != len(x): self.h = torch.zeros(len(x), 8, device=x.device)
        return super().forward(x)

class Layers(nn.Module):
    "A list of tensors, made on the CPU at each reset"
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.out = nn.Embedding(10, 8),nn.LSTM(8, 8, 2, batch_first=True),nn.Linear(8, 10)
        self.reset()
    def forward(self, x):
        res,h = self.rnn(self.emb(x), self.h)
        self.h = [o.detach() for o in h]
        return self.out(res)
    def reset(self): self.h = [torch.zeros(2, 8, 8) for _ in range(2)]

def seq_loss(pred, targ): return F.cross_entropy(pred.flatten(0, 1), targ.flatten())
def seq_learner(model, cbs=ModelResetter, **kwargs): return Learner(sequences(**kwargs), model(), loss_func=seq_loss, cbs=cbs)

def fits_and_validates(learn):
    fits(learn)
    metrics,preds = learn.validate(),learn.get_preds()[0]
    fits(learn, 1)
    return metrics,preds,learn.model.h

@pytest.mark.parametrize('model,odd', [(Resets, 0), (Sized, 3), (Layers, 0)])
def test_hidden_state_in_an_attribute(model, odd):
    "It is 0 or `None` after a reset and a tensor later, or comes from the CPU, or changes its size with the batch"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn = compare(lambda: seq_learner(model, odd=odd), fits_and_validates)
    assert sum(plain(learn).values()) <= 2   # the first batch after a reset, in training and in validation

def test_hidden_state_reset_within_an_epoch():
    "The recording of a tensor is not run with a number"
    class Forgets(Callback):
        def before_batch(self):
            if self.training and self.iter % 2: self.model.h = 0
    compare(lambda: seq_learner(Recurrent, cbs=Forgets()), fits)

class Nested(Recurrent):
    "A state in a list of tuples, as that of AWD_LSTM, in float32 after a reset and in bfloat16 after a batch"
    def __init__(self):
        super().__init__()
        self.reset()
    def reset(self): self.state = [(torch.zeros(8, 8, device=self.out.weight.device),)]
    def forward(self, x):
        self.h = self.state[0][0]
        res = super().forward(x)
        self.state,self.h = [(self.h,)],0
        return res

def test_hidden_state_changes_its_dtype_in_mixed_precision():
    """A recording for float32 is not run with bfloat16

    XLA computes otherwise than the CPU in bfloat16, so steps are compared with retraced ones"""
    def story(learn):
        fits(learn)
        return learn.validate(),learn.model.state
    make = lambda: seq_learner(Nested).to_bf16()
    (learn,replayed),(_,retraced) = told(make, story, True),told(make, story, True, replay=False)
    assert all(agree(retraced[k], replayed[k], 1e-6) for k in {**retraced, **replayed})
    assert not plain(learn)

def test_hidden_state_on_the_cpu_is_moved_and_told_once():
    learn = seq_learner(Layers)
    with pytest.warns(UserWarning, match=r"The model keeps h on the CPU.*register_buffer\('h'") as told:
        learn.to_xla()
        with learn.no_logging(), learn.no_bar(): fits(learn)
    assert len([w for w in told if 'keeps h on the CPU' in str(w.message)]) == 1
    assert all(is_xla(t) for t in learn.model.h)
    learn.detach_xla()
    assert not any(is_xla(t) for t in learn.model.h)
    with learn.no_logging(), learn.no_bar(): fits(learn, 1)

def test_error_names_a_tensor_left_on_the_cpu():
    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn,self.start = nn.RNN(64, 4, batch_first=True),torch.zeros(1, 8, 4)
        def forward(self, x): return self.rnn(x.flatten(1)[:,None], self.start)[0][:,0]
    learn = Learner(image_dls(n=2*8, n_valid=8, bs=8), Shifts(), loss_func=CrossEntropyLossFlat()).to_xla()
    said = r"On the CPU are still: model.start.*register_buffer\('start'"
    with learn.no_logging(), learn.no_bar(), pytest.raises(RuntimeError, match=said): learn.fit(1)

# Data that is on the device already

def table(device, n=6*8):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 64, generator=g).to(device),torch.randint(4, (n,), generator=g).to(device)

def table_dls(kind, device, **kwargs):
    x,y = table(device)
    if kind == 'rows': parts = [TensorDataset(x[s], y[s]) for s in (slice(32), slice(32, None))]
    elif kind == 'items': parts = [[(x[i], y[i]) for i in r] for r in (range(32), range(32, 48))]
    else: parts = [[(dict(x=x[i]), y[i]) for i in r] for r in (range(32), range(32, 48))]
    return DataLoaders.from_dsets(*parts, bs=8, num_workers=0, shuffle=False, **kwargs)

class OfDict(nn.Module):
    def __init__(self): 
        super().__init__()
        self.net = mlp()
    def forward(self, x): return self.net(x['x'] if isinstance(x, dict) else x)

@pytest.mark.parametrize('kind', ['rows', 'items', 'dicts'])
@pytest.mark.parametrize('where', ['cpu', 'xla'])
def test_data_on_the_device(kind, where):
    _,there = told(lambda: Learner(table_dls(kind, 'cpu'), OfDict(), loss_func=F.cross_entropy, metrics=accuracy), fits)
    _,here = told(lambda: Learner(table_dls(kind, device() if where == 'xla' else 'cpu'), OfDict(),
                                  loss_func=F.cross_entropy, metrics=accuracy), fits, True)
    assert there.keys() == here.keys() and all(agree(there[k], here[k], 1e-4) for k in there)

workers = '''
import warnings
from fastai.vision.all import *
from fastai_xla.all import *
from torch.utils.data import TensorDataset
x,y = torch.randn(16, 3).to(device()),torch.arange(16).to(device())
for where in (device(), None):
    dl = DataLoader(TensorDataset(x, y), bs=4, num_workers=2, device=where)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        n = len(list(dl))
    print(n, 'are on an XLA device, which a worker process cannot reach' in str(told[0].message))
'''

def test_items_on_the_device_are_not_read_by_workers():
    "They would wait for ever"
    res = subprocess.run([sys.executable, '-c', workers], capture_output=True, text=True, timeout=300)
    assert res.stdout.split() == ['4', 'True']*2, res.stderr

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
    if name == 'one_batch': there = compare(make, fits)
    else: there = compare(make, fits, replays=('auto',))
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
    learn = compare(learner_with(where, monkeypatch, f), partial(fits, n=3))
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

@pytest.mark.parametrize('where', ['subclass', 'instance'])
@pytest.mark.parametrize('f', [as_a_package_has_it, halves_the_batch, steps_twice, wraps, by_hand])
def test_a_learner_has_another_one_batch(monkeypatch, where, f):
    g = wraps(Learner.one_batch) if f is wraps else f
    learn = compare(learner_with(where, monkeypatch, g, 'one_batch'), fits)
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
    learn = compare(lambda: learner(opt_func=SGD), fits)
    assert not plain(learn)
    assert [n for why,n in learn.xla_report().beside.items() if 'Recorder' in why] == [2*(5+2)]
