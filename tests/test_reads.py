"""What the user's own functions read is compared before a step is replayed

What they do to objects of their own is neither lost nor done twice."""
import array as arrays, contextvars, csv, ctypes, io, itertools, operator, pickle, random, sys, warnings, weakref
from collections import deque
from copy import deepcopy
from functools import lru_cache
from types import SimpleNamespace

import pytest
from fastai.callback.hook import hook_output
from fastai.callback.training import GradientAccumulation
from common import *
from test_replay import compare, n_runs, run
from fastai_xla.all import *
from fastai_xla.capture.reads import Reads
from fastai_xla.capture.watch import Watch
from fastai_xla.runtime import device
from fastai_xla.transfer import fetch

pytestmark = pytest.mark.usefixtures('recorded')

def ce(p, y): return F.cross_entropy(p, y)

# What is read, and changes between two fits

alpha,cfg,weights,funcs = 1.,SimpleNamespace(),torch.ones(4),[]
def act(x): return x
class Scaled(Module):
    "A layer with settings in an object"
    def __init__(self): self.cfg = SimpleNamespace(scale=1.)
    def forward(self, x): return x*self.cfg.scale

def reset():
    global alpha, weights, act
    alpha,cfg.gamma,weights,funcs[:] = 1.,1.,torch.ones(4),[abs]
    def act(x): return x
    Scaled.forward = lambda self, x: x*self.cfg.scale

def learner(loss=ce, *layers, **kw):
    reset()
    learn = image_learner(loss_func=loss, **kw)
    for l in layers: learn.model.append(l)
    return learn

def set_alpha(_):
    global alpha
    alpha = .3
def set_weights(_):
    global weights
    weights = torch.tensor([1.,.5,.5,1.])
def set_act(_):
    global act
    def act(x): return x*.3
def patch_forward(_): Scaled.forward = lambda self, x: x*.3

def closure():
    beta = 1.
    def loss(p, y): return ce(p, y)*beta
    def change(_):
        nonlocal beta
        beta = .3
    return loss,change
def with_partial():
    loss = partial(F.cross_entropy, label_smoothing=.1)
    return loss,lambda _: loss.keywords.update(label_smoothing=.4)

reads = dict(global_number=(lambda: learner(lambda p,y: ce(p, y)*alpha), set_alpha),
    host_tensor=(lambda: learner(lambda p,y: F.cross_entropy(p, y, weight=weights.to(p.device))), set_weights),
    functions=(lambda: learner(lambda p,y: funcs[0](ce(p, y))), lambda _: funcs.__setitem__(0, torch.sqrt)),
    redefined=(lambda: learner(lambda p,y: act(ce(p, y))), set_act), patched=(lambda: learner(ce, Scaled()), patch_forward),
    model_settings=(lambda: learner(ce, Scaled()), lambda l: setattr(l.model[-1].cfg, 'scale', .3)),
    metric=(lambda: learner(metrics=lambda p,y: (p.softmax(1).max(1).values > alpha-.7).float().mean()), set_alpha))
reads |= {f.__name__: f for f in (closure, with_partial)}

def story(name):
    if callable(reads[name]):
        found = []
        def make():
            loss,change = reads[name]()
            found[:] = [change]
            return learner(loss)
        change = lambda l: found[0](l)
    else: make,change = reads[name]
    def fits(learn):
        learn.fit(1, 1e-2)
        change(learn)
        learn.fit(1, 1e-2)
    return make,fits

@pytest.mark.parametrize('name', reads)
def test_read(name):
    learn,_ = compare(*story(name))
    assert n_runs(learn) >= len(learn.dls.train)+len(learn.dls.valid), (n_runs(learn), learn.xla_opt.replay.reasons.why)

@pytest.mark.parametrize('name', ['global_number', 'closure', 'model_settings', 'patched'])
def test_read_control(name, monkeypatch, without_audits):
    "Without a look at what was read the old value stays"
    monkeypatch.setattr(Reads, 'moved', lambda self: '')
    monkeypatch.setattr(Watch, 'classes', property(lambda self: [], lambda self, classes: None), raising=False)   # looks at `forward`, too
    with pytest.raises(AssertionError): compare(*story(name))

def test_audit_finds_what_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(Reads, 'moved', lambda self: '')
    with pytest.warns(UserWarning, match='an audit found'): compare(*story('global_number'))

def test_number_of_the_learner():
    "What the text of that refusal recommends: one program for all values"
    class Anneals(Callback):
        def before_fit(self): self.learn.alpha = .8
        def after_batch(self): self.learn.alpha *= .9
    def make():
        learn = learner(cbs=Anneals())
        learn.loss_func = lambda p,y: ce(p, y)*learn.alpha
        return learn
    learn,probe = compare(make, lambda l: l.fit(2, 1e-2))
    assert not learn.xla_opt.replay.reasons.why and n_runs(learn) == len(probe.rows)

def test_by_epoch():
    "A value that changes again and again is given up, in time"
    class Anneals(Callback):
        def before_epoch(self): cfg.gamma = 1/(1+self.epoch)
    learn,_ = compare(lambda: learner(lambda p,y: ce(p, y)*cfg.gamma, cbs=Anneals()), lambda l: l.fit(4, 1e-2))
    assert any('cfg.gamma' in why for why in learn.xla_opt.replay.reasons.why)

# Settings that are read in ways in which no name of the code leads to them, changed within an epoch

class Holder:
    def __init__(self): self.rate,self.inner = 1.,SimpleNamespace(rate=1.)
class Stack:
    def __init__(self): self.kept = [Holder()]
    def __getitem__(self, i): return self.kept[i]
class Delegates:
    def __init__(self, o): object.__setattr__(self, '_o', o)
    def __getattr__(self, k): return getattr(self._o, k)
class Box:
    def __init__(self): self.h = Holder()
    @property
    def now(self): return self.h

settings,holder,stack,boxed = SimpleNamespace(loss=SimpleNamespace(rate=1.)),Holder(),Stack(),Box()
numbers,cnumber,percents,weak = arrays.array('f', [1.]),ctypes.c_double(1.),bytearray([100]),weakref.ref(holder)
deep,rate = Delegates(SimpleNamespace(opts=SimpleNamespace(rate=1.))),1.
def get_settings(): return settings
def set_rates(v):
    global rate
    rate = settings.loss.rate = holder.rate = holder.inner.rate = numbers[0] = stack[0].inner.rate = deep.opts.rate = boxed.h.inner.rate = v
    cnumber.value,percents[0] = v,int(100*v)

ways = dict(getter=lambda: get_settings().loss.rate, weak=lambda: weak().rate, weak_inner=lambda: weak().inner.rate,
    array=lambda: numbers[0], ctypes=lambda: cnumber.value, bytes=lambda: percents[0]/100,
    attrgetter=lambda: operator.attrgetter('loss.rate')(settings), modules=lambda: sys.modules[__name__].rate,
    item=lambda: stack[0].inner.rate, delegated=lambda: deep.opts.rate, property=lambda: boxed.now.inner.rate,
    comprehension=lambda: sum([o.rate for o in (holder, holder)])/2)

class Rated(nn.Module):
    "With a hook in the backward pass, of which a log knows nothing: the step is recorded, or retraced"
    def __init__(self, way):
        super().__init__()
        self.a,self.way = nn.Linear(4, 1),ways[way]
    def forward(self, x):
        h = self.a(x)
        if h.requires_grad: h.register_hook(lambda g: g*.5)
        return h*self.way()

class SetsRates(Callback):
    def before_fit(self): set_rates(1.)
    def after_batch(self):
        if self.training and self.iter == 10: set_rates(.3)   # no audit follows in this epoch

@pytest.mark.parametrize('k', [1, 4])
@pytest.mark.parametrize('way', ways)
def test_read_by_another_way(way, k, without_audits):
    res = []
    for xla in (False, True):
        torch.manual_seed(0)
        x = torch.randn(112, 4)
        learn = Learner(DataLoaders.from_dsets(list(zip(x, x[:,:1])), list(zip(x, x[:,:1])), bs=8), Rated(way), loss_func=nn.MSELoss(),
                        opt_func=SGD, cbs=SetsRates())
        learn.dls.train.shuffle = False
        if xla: learn.to_xla(steps_per_execution=k)
        with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            learn.fit(1, 1e-2)
        res.append(list(map(float, learn.recorder.losses)))
    test_close(*res, eps=1e-4)

# What the user's functions do beside computing

count,box,queue,array,stream = SimpleNamespace(),[],deque(),np.zeros(1),io.StringIO()
class Counted(Module):
    n = 0
    def forward(self, x):
        type(self).n += 1
        return x
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g):
        count.n += 1
        return g
class Hook:
    def __call__(self, *args): count.n += 1
class Writes(Callback):
    def after_loss(self): csv.writer(stream).writerow([1])
class Queues(Callback):
    def after_loss(self): queue.append(1)
class Arrays(Callback):
    def after_loss(self): array[:] += 1
class Nested(Callback):
    def after_loss(self): count.n += 1
class Layer(Module):
    def __init__(self, f): self.f = f
    def forward(self, x): return self.f(x)
def hooked(f):
    learn = learner()
    f(learn.model)
    return learn

done = dict(class_number=(lambda: learner(ce, Counted()), lambda: Counted.n, True),
    backward=(lambda: learner(ce, Layer(Function.apply)), lambda: count.n, False),
    hook=(lambda: hooked(lambda m: m[0].register_forward_hook(Hook())), lambda: count.n, True),
    gradient_hook=(lambda: hooked(lambda m: next(m.parameters()).register_hook(Hook())), lambda: count.n, False),
    backward_hook=(lambda: hooked(lambda m: m[0].register_full_backward_hook(Hook())), lambda: count.n, False),
    writer=(lambda: learner(cbs=Writes()), lambda: stream.getvalue().count('1'), True),
    queue=(lambda: learner(cbs=Queues()), lambda: len(queue), True), array=(lambda: learner(cbs=Arrays()), lambda: array[0], True),
    namespace=(lambda: learner(cbs=Nested()), lambda: count.n, True))

@pytest.mark.parametrize('name', done)
def test_done(name):
    "Once for each batch, as without recordings"
    make,counted,always = done[name]
    def fit(learn):
        count.n,Counted.n,array[:] = 0,0,0
        queue.clear()
        stream.truncate(stream.seek(0))
        learn.fit(2, 1e-2)
        box.append(counted())
    box.clear()
    learn,_ = compare(make, fit)
    n = 2*(len(learn.dls.train) + always*len(learn.dls.valid))
    assert box == [n, n]

rng,turns = random.Random(0),itertools.count()
class Drawn(Module):
    def __init__(self, draw): self.draw = draw
    def forward(self, x): return x*self.draw()
def bound(): return Drawn(rng.random)
def by_function(): return Layer(lambda x: x*rng.random())
def turn(): return Layer(lambda x: x*(1+next(turns)%2))

@pytest.mark.parametrize('make', [bound, by_function, turn])
def test_own_generator(make):
    "Generators and iterators of the user's own go on as they would"
    def fit(learn):
        global turns
        turns = itertools.count()
        rng.seed(0)
        learn.fit(2, 1e-2)
        box.append((rng.random(), next(turns)))
    box.clear()
    compare(lambda: learner(ce, make()), fit)
    assert box[0] == box[1]

def test_cache():
    "What a cache has kept of a trace is not there any more"
    @lru_cache
    def mask(n, dev): return torch.tril(torch.ones(n, n, device=dev))
    def make():
        mask.cache_clear()
        return learner(ce, Layer(lambda x: x@mask(4, x.device)))
    learn,_ = compare(make)
    assert not learn.xla_opt.replay.reasons.why

# Aliases, copies, hooks

@pytest.mark.parametrize('alias', [lambda l: l.model.state_dict(), lambda l: dict(enumerate(p.detach() for p in l.model.parameters()))])
@pytest.mark.parametrize('when', ['before', 'between'])
def test_alias(alias, when):
    "An alias of the weights goes along with them"
    def fits(learn):
        if when == 'between': learn.fit(1, 1e-2)
        held = alias(learn)
        learn.fit(2, 1e-2)
        for a,b in zip(fetch(list(held.values())),
                       fetch([learn.model.state_dict()[k] if isinstance(k, str)
                              else list(learn.model.parameters())[k].detach() for k in held])):
            assert torch.equal(a, b)
    learn,_ = compare(learner, fits)
    assert any('alias' in why for why in learn.xla_opt.replay.reasons.why)

def test_weights_loaded_twice():
    "Weights that are kept on the device can be loaded again"
    def fits(learn):
        learn.fit(1, 1e-2)
        first = {k: v.clone() for k,v in learn.model.state_dict().items()}
        before = fetch(first)
        for _ in range(2):
            learn.fit(1, 1e-2)
            learn.model.load_state_dict(first)
        for k,v in fetch(first).items(): assert torch.equal(v, before[k])
        learn.fit(1, 1e-2)
    compare(learner, fits)

def test_gradient_hook():
    "fastai's own hook of gradients"
    def fit(learn):
        with hook_output(learn.model[0], grad=True) as h: learn.fit(2, 1e-2)
        box.append(fetch(h.stored[0]))
    box.clear()
    compare(learner, fit)
    assert torch.equal(*box)

class Noise(Callback):
    "Langevin noise on the weights"
    def after_batch(self):
        if self.training:
            with torch.no_grad():
                for p in self.model.parameters(): p += torch.randn_like(p)*1e-2

@pytest.mark.parametrize('layers', [(), (nn.Dropout(.2),)])
def test_drawn_after_batch(layers):
    learn,_ = compare(lambda: learner(ce, *layers, cbs=Noise()), tol=1e-6)
    assert not learn.xla_opt.replay.reasons.why

class Restores(Callback):
    def before_batch(self): self.y,self.learn.yb = self.yb,(1-self.yb[0].clamp(max=1),)
    def after_batch(self): self.learn.yb = self.y

def test_changed_after_batch():
    "Metrics are computed after a callback that changes what they are computed of"
    make,fit = lambda: learner(cbs=Restores()),lambda l: l.fit(2, 1e-2)
    plain,*_ = run(make, fit, False)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='.*before the recorder')   # its code says so, before the first batch
        replayed,*_ = run(make, fit, True)
    for a,b in zip(replayed.recorder.values, plain.recorder.values, strict=True): test_close(a, b, eps=1e-6)

# The learner around it

def test_new_data_keeps_state():
    "New dataloaders, validated before they are trained on: the optimizer goes on"
    def fits(learn):
        learn.fit(1, 1e-2)
        learn.dls = image_dls()
        learn.validate()
        learn.fit(1, 1e-2)
    learn,_ = compare(partial(learner, opt_func=Adam), fits)
    assert all(st['step'] == 2*len(learn.dls.train) for st in learn.opt.state.values())

@pytest.mark.parametrize('copied', [deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copied_after_fit(copied):
    learn = image_learner().to_xla()
    with learn.no_logging():
        learn.fit(1, 1e-2)
        other = copied(learn)
        other.fit(1, 1e-2)
    assert n_runs(other) > 0 and other.xla_opt.replay.learn is other

class OwnBatch(Learner):
    "Has its own way with a batch"
    def one_batch(self, i, b):
        x,y = b
        super().one_batch(i, (x*.5, y))

def test_own_one_batch():
    def make():
        dls = image_dls()
        return OwnBatch(dls, image_learner(dls).model, loss_func=CrossEntropyLossFlat())
    learn,_ = compare(make)
    assert n_runs(learn) > 0

def test_mixed_precision_accumulated():
    "Several as one is refused there, and autocast left: the numbers of one by one"
    def trained(**kw):
        set_seed(0)
        learn = learner(cbs=GradientAccumulation(48)).to_bf16().to_xla(**kw)
        with learn.no_logging(): learn.fit(2, 1e-2)
        assert not torch.is_autocast_enabled('xla')
        return fetch(list(learn.model.state_dict().values()))
    for a,b in zip(trained(replay=False), trained(steps_per_execution=2)): assert torch.equal(a, b)

class Breaks:
    "Ten batches of 4, and then an exception"
    def __len__(self): return 80
    def __getitem__(self, i):
        if i == 42: raise ValueError('no item 42')
        return torch.full((3,), i/80), i % 2

def test_trained_before_exception():
    "With several steps as one, too, batches before the one that cannot be read are trained on"
    def trained(**kw):
        set_seed(0)
        dls = DataLoaders.from_dsets(Breaks(), Breaks(), bs=4, shuffle=False, drop_last=False, num_workers=0)
        learn = Learner(dls, nn.Linear(3, 2), loss_func=F.cross_entropy, opt_func=SGD, metrics=[]).to_xla(**kw)
        with learn.no_logging(), learn.no_bar(), pytest.raises(ValueError, match='no item 42'): learn.fit(1, 1e-1)
        return fetch(list(learn.model.state_dict().values()))
    for a,b in zip(trained(replay=False), trained(steps_per_execution=4)): test_close(a, b, eps=1e-6)

def test_hyper_after_batch():
    "With several steps as one, what a callback sets in `after_batch` stays"
    class Decays(Callback):
        def after_batch(self):
            if self.training: self.opt.set_hyper('lr', self.opt.hypers[-1]['lr']*.9)
    learn = learner(cbs=Decays()).to_xla(steps_per_execution=4)
    with learn.no_logging(): learn.fit(1, 1e-2)
    test_close(learn.opt.hypers[-1]['lr'], 1e-2*.9**len(learn.dls.train), eps=1e-9)

# Data

class Graphs:
    "Items that depend on a parameter"
    w = torch.ones(3, requires_grad=True)
    def __len__(self): return 16
    def __getitem__(self, i): return self.w*i, i % 2

def test_items_with_a_graph():
    dls = DataLoaders.from_dsets(Graphs(), Graphs(), bs=4, num_workers=0)
    learn = Learner(dls, nn.Linear(3, 2), loss_func=F.cross_entropy, metrics=[]).to_xla()
    with learn.no_logging(), learn.no_bar(): learn.fit(1, 1e-2)
    assert Graphs.w.grad is not None

def test_table_like_fastai():
    "A table's pass draws the number that fastai's draws, and keeps what `retain` does"
    from torch.utils.data import TensorDataset
    ds = TensorDataset(torch.arange(12.), torch.arange(12))
    for kw in ({}, dict(retain=lambda res, b: L(res))):
        states = []
        for dev in ('cpu', device()):
            set_seed(0)
            dls = DataLoaders.from_dsets(ds, ds, bs=4, num_workers=0, device=dev, **kw)
            bs = list(dls.train)
            states.append((torch.get_rng_state(), [type(b) for b in bs], [b[1].tolist() for b in bs]))
        assert torch.equal(states[0][0], states[1][0]) and states[0][1:] == states[1][1:]

class Sees:
    "Items for which the model is asked"
    def __len__(self): return 32
    def __getitem__(self, i): return torch.full((3,), float(i)), int(self.model(torch.ones(1, 3).to(device())).sum().item() > 100)

def test_dataset_asks_the_model():
    ds = Sees()
    dls = DataLoaders.from_dsets(ds, ds, bs=4, num_workers=0)
    learn = Learner(dls, nn.Linear(3, 2), loss_func=F.cross_entropy, metrics=[]).to_xla()
    ds.model = learn.model
    with learn.no_logging(), learn.no_bar(): learn.fit(2, 1e-2)
    assert len(learn.recorder.losses) == 16

var = contextvars.ContextVar('var', default=0)
class Context:
    def __len__(self): return 32
    def __getitem__(self, i): return torch.full((1,), var.get())

def test_context():
    "A dataset sees the context variables of whoever reads it, ahead too"
    var.set(7)
    dls = DataLoaders.from_dsets(Context(), Context(), bs=4, num_workers=0, device=device())
    assert torch.cat([b.cpu() for b in dls.train]).eq(7).all()
