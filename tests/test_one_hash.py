"""Graphs that differ only in which of several like tensors is used twice: torch_xla has one hash for them, and runs the first one's program

Retraced and replayed steps, with the numbers of plain fastai on the CPU"""
import functools
from collections import deque
from by_log import *
from common import image_dls, image_learner
import fastai_xla.apart, fastai_xla.opt_callback

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.i,self.ls,self.h = nn.Linear(6, 8),nn.ModuleList(nn.Linear(8, 8) for _ in range(4)),nn.Linear(8, 1)
        self.n = 0
    def forward(self, x):
        x = torch.tanh(self.i(x))
        return self.h(self.mix(x, [l(x.detach()) for l in self.ls])) + x.mean(1, keepdim=True)
    def pick(self, ts):
        self.n += self.training
        return ts[self.turn(self.n) % 4]

def in_turn(n): return n
def at_random(n): return random.randrange(4)
def by_epoch(n): return (n-1)//10   # each of 10 batches of training

class Teachers(Layers):
    "One of several frozen teachers beside their mean"
    def __init__(self):
        super().__init__()
        for l in self.ls: l.requires_grad_(False)
    def mix(self, x, ts): return x*self.pick(ts) - .2*x*torch.stack(ts).mean(0)

class Prototypes(Layers):
    "Buffers, of which one is added and all are looked at"
    def __init__(self):
        super().__init__()
        for i in range(4): self.register_buffer(f'p{i}', torch.randn(8))
    def mix(self, x, ts):
        ps = [getattr(self, f'p{i}') for i in range(4)]
        x = x + .3*self.pick(ps)
        return x*(x@torch.stack(ps).T).softmax(1).max(1, keepdim=True)[0]

class Bank(Layers):
    "The last activations, of which one is drawn"
    def __init__(self):
        super().__init__()
        self.bank = deque(maxlen=4)
    def mix(self, x, ts):
        if self.training: self.bank.append(x.detach().mean(0))
        kept = [*self.bank] or [x.detach().mean(0)]
        return x - .5*torch.stack(kept).mean(0) + .5*kept[self.turn(self.n) % len(kept)]

def story(cls, turn):
    return lambda: dict(model=type('Net', (cls,), dict(turn=staticmethod(turn))))

@functools.lru_cache
def on_cpu(cls, turn, n): return run(story(cls, turn), None, xla=False, n=n)[0]

@pytest.mark.parametrize('replay', ['auto', False])
@pytest.mark.parametrize('cls,turn,n', [(Teachers, in_turn, 2), (Teachers, at_random, 2), (Teachers, by_epoch, 4),
                                        (Prototypes, in_turn, 2), (Bank, at_random, 2)])
def test_like_tensors_take_turns(cls, turn, n, replay):
    cpu,(got,_) = on_cpu(cls, turn, n),run(story(cls, turn), replay, n=n)
    np.testing.assert_allclose(got['losses'], cpu['losses'], rtol=1e-5)
    for k,v in cpu['sd'].items(): torch.testing.assert_close(got['sd'][k], v, rtol=1e-4, atol=1e-5)

def test_without_a_look_they_are_taken_for_one_another(monkeypatch):
    "The control: a `sync` as torch_xla has it"
    monkeypatch.setattr(fastai_xla.opt_callback, 'sync_apart', lambda *args: fastai_xla.runtime.torch_xla.sync())
    with pytest.raises(AssertionError): test_like_tensors_take_turns(Teachers, in_turn, 4, False)

def test_a_large_graph_is_looked_at_again_where_an_epoch_begins(monkeypatch):
    "The first four batches of it are the same: after that it is looked at once more within the epoch"
    looks,core = [],fastai_xla.apart._XLAC
    class Core:
        def __getattr__(self, k): return getattr(core, k)
        def _get_xla_tensors_hlo_proto(self, roots):
            looks.append(len(roots))
            return core._get_xla_tensors_hlo_proto(roots)
        def _get_xla_tensors_hlo(self, roots): return core._get_xla_tensors_hlo(roots) + ' '*20_000
    monkeypatch.setattr(fastai_xla.apart, '_XLAC', Core())
    class Five(Teachers):   # a graph of its own, which no other test has run
        def __init__(self):
            super().__init__()
            self.ls.append(nn.Linear(8, 8).requires_grad_(False))
    test_like_tensors_take_turns(Five, by_epoch, 4, False)
    assert len(looks) < 44, len(looks)   # of 40 batches of training and 8 of validation: not of five in the first epoch

class Keeps(Callback):
    "What nobody reads before the fit is over: the batch after computes it, beside whatever else is pending"
    def before_fit(self):
        d = next(self.learn.model.parameters()).device
        ts = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
        *self.ps,self.sum = (t.to(d) for t in ts)
        self.o,self.n = SimpleNamespace(sum=self.sum*2),0
    def after_batch(self):
        self.n += 1
        p,q = (self.ps[(self.n+i)%4] for i in range(2))
        self.sum = self.sum*.9 + p*torch.stack(self.ps).mean(0)
        self.o.sum = self.o.sum*.9 + q*torch.stack(self.ps).mean(0)
    def after_fit(self): self.kept = [o.cpu() for o in (self.sum, self.o.sum)]

def what_it_keeps(**kw):
    cb = Keeps()
    learn = image_learner(dls=image_dls(shuffle=False), cbs=cb)
    if kw: learn.to_xla(**kw)
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
    return cb.kept

@functools.lru_cache
def kept_on_cpu(): return what_it_keeps()

def as_kept(**kw): return all(map(partial(torch.allclose, rtol=1e-4, atol=1e-5), what_it_keeps(**kw), kept_on_cpu()))

@pytest.mark.parametrize('kw', [dict(replay='auto'), dict(replay=False), dict(steps_per_execution=4)])
def test_what_a_callback_computes_and_never_reads(kw): assert as_kept(**kw)

def test_torch_xla_computes_something_else_there(monkeypatch):
    "The control"
    monkeypatch.setattr(fastai_xla.opt_callback, 'held_by', lambda cbs: [])
    assert not as_kept(replay='auto')
