"""What the user's own functions read is compared before a step is replayed

What they do to objects of their own is neither lost nor done twice."""
import array as arrays, csv, ctypes, io, itertools, operator, random, sys, warnings, weakref
from collections import deque
from functools import lru_cache
from types import SimpleNamespace
import pytest
from common import *
from reading import *
from test_replay import compare, n_runs, run, same
from fastai_xla.all import *
from fastai_xla.capture.reads import Reads
from fastai_xla.capture.watch import Watch

pytestmark = pytest.mark.usefixtures('recorded')

@lru_cache
def retraced(name): return run(*story(name), False)[2]

def as_retraced(name):
    "A replayed fit leaves what a retraced one does; its learner"
    plain,(learn,_,replayed) = retraced(name),run(*story(name), True)
    assert len(plain) == len(replayed) and all(same(a, b, 0) for a,b in zip(plain, replayed))
    return learn

@pytest.mark.parametrize('name', reads)
def test_read(name):
    learn = as_retraced(name)
    assert n_runs(learn) >= len(learn.dls.train)+len(learn.dls.valid), (n_runs(learn), learn.xla_opt.replay.reasons.why)

@pytest.mark.parametrize('name', ['global_number', 'closure', 'model_settings', 'patched'])
def test_read_control(name, monkeypatch, without_audits):
    "Without a look at what was read the old value stays"
    monkeypatch.setattr(Reads, 'moved', lambda self: '')
    monkeypatch.setattr(Watch, 'classes', property(lambda self: [], lambda self, classes: None), raising=False)   # looks at `forward`, too
    with pytest.raises(AssertionError): as_retraced(name)

def test_audit_finds_what_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(Reads, 'moved', lambda self: '')
    with pytest.warns(UserWarning, match='an audit found'): as_retraced('global_number')

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

@pytest.mark.parametrize('way', ways)
def test_read_by_another_way(way, without_audits):
    res = []
    for xla in (False, True):
        torch.manual_seed(0)
        x = torch.randn(112, 4)
        learn = Learner(DataLoaders.from_dsets(list(zip(x, x[:,:1])), list(zip(x, x[:,:1])), bs=8), Rated(way), loss_func=nn.MSELoss(),
                        opt_func=SGD, cbs=SetsRates())
        learn.dls.train.shuffle = False
        if xla: learn.to_xla(steps_per_execution=4)
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

norms = '''
class Norm(torch.nn.BatchNorm2d):
    "As timm's for split batches, which has an activation where it was made of a layer with one"
    features = False
    def forward(self, x):
        x = super().forward(x)
        if self.features: return x, self.indices
        return self.act(x) if hasattr(self, 'act') else x
'''

class Activates(Callback):
    def after_batch(self):
        if self.training and (self.epoch, self.iter) == (0, 3): self.model[0].act = nn.Tanh()

@pytest.mark.parametrize('cbs', [None, Activates])
def test_what_a_module_of_a_library_does_not_have(cbs):
    exec(norms, scope := dict(__name__='timm.norms', torch=torch))
    def make():
        model = nn.Sequential(scope['Norm'](1), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16, 10))
        return Learner(image_dls(), model, loss_func=ce, cbs=cbs and cbs())
    learn,_ = compare(make)
    assert not learn.xla_opt.replay.reasons.why and n_runs(learn)
