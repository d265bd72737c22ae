"`set_seed` and `torch.manual_seed` are the XLA device's as well: before a fit, around a step, and in the middle of one"
import threading
import pytest, torch
from fastai.vision.all import *

from fastai_xla.all import *
from fastai_xla.graphs import rng_state

pytestmark = pytest.mark.filterwarnings('ignore')

def dls():
    set_seed(1)
    xs = torch.randn(96, 8)
    ys = (xs.sum(1) > 0).long()
    return DataLoaders.from_dsets(list(zip(xs, ys)), list(zip(xs[:32], ys[:32])), bs=16, num_workers=0, device='cpu')

class Net(nn.Module):
    def __init__(self, f=None):
        super().__init__()
        self.a,self.b,self.drop,self.f,self.n = nn.Linear(8, 16),nn.Linear(16, 2),nn.Dropout(.5),f,0
    def forward(self, x):
        if self.f is not noise_of_one_seed: self.n += 1
        if self.f and self.training: x = self.f(self, x)
        return self.b(self.drop(self.a(x).relu()))

def library_model(f=None): return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(.5), nn.Linear(16, 2))

def fitted(cb=None, f=None, model=Net, seed=9, **kwargs):
    "A learner after two epochs from a seed, its weights, and where its random numbers go on"
    set_seed(7)
    learn = Learner(dls(), model(f), loss_func=CrossEntropyLossFlat(), opt_func=Adam).to_xla(**kwargs)
    set_seed(seed)
    with learn.no_logging(), learn.no_bar(): learn.fit(2, 1e-2, cbs=cb and cb())
    return learn,torch.cat([p.detach().cpu().flatten() for p in learn.model.parameters()]),rng_state()

class AtEachBatch(Callback):
    def before_batch(self): set_seed(self.train_iter)
class AfterEachBatch(Callback):
    def after_batch(self): torch.manual_seed(3)
class AtEachEpoch(Callback):
    def before_epoch(self): set_seed(3)
class KeepsTheState(Callback):
    def after_batch(self):
        with no_random(): torch.rand(3, device='xla')
class ForTheHost(Callback):
    def before_batch(self):
        with no_random(5): self.noise = torch.randn(3)
class AfterTheStep(Callback):
    def after_step(self): torch.manual_seed(self.train_iter)

def noise(m, x):
    torch.manual_seed(m.n)
    return x + .1*torch.randn_like(x)
def noise_of_the_host(m, x):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        z = torch.randn(x.shape[-1])
    return x + .1*z.to(x.device)
def noise_after_dropout(m, x): return noise(m, F.dropout(x, .2))
def noise_of_one_seed(m, x):
    manual_seed(4)
    return x + .1*torch.randn_like(x)
def noise_aside(m, x):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        z = torch.randn_like(x)
    return x + .1*z
def noise_and_back(m, x):
    was = torch.get_rng_state()
    torch.manual_seed(4)
    z = torch.randn_like(x)
    torch.set_rng_state(was)
    return x + .1*z

replayed = [dict(), dict(model=library_model), dict(model=library_model, steps_per_execution=3), dict(cb=AtEachEpoch, model=library_model),
            *(dict(cb=cb) for cb in (AtEachBatch, AfterEachBatch, AtEachEpoch, KeepsTheState, ForTheHost)),
            dict(f=noise), dict(f=noise_of_one_seed), dict(f=noise_of_the_host), dict(f=noise, cb=AtEachBatch)]
retraced = [dict(cb=AfterTheStep), *(dict(f=f) for f in (noise_after_dropout, noise_aside, noise_and_back))]
name = lambda c: '-'.join(getattr(o, '__name__', str(o)) for o in c.values()) or 'plain'

replayed_again = 'plain', 'library_model', 'library_model-3', 'noise'   # where all that the first fit has found is known

@pytest.mark.parametrize('case', replayed+retraced, ids=name)
def test_a_seed_repeats_a_fit(case):
    learn,w,state = fitted(**case)
    if name(case) in replayed_again:
        _,again,state2 = fitted(**case)
        assert torch.equal(w, again) and state == state2
    seeded = case.get('cb') in (AtEachBatch, AtEachEpoch) or case.get('f') in (noise, noise_of_one_seed)   # by themselves
    assert seeded or not torch.equal(w, fitted(**case, seed=10)[1])
    _,plain,state3 = fitted(**case | dict(steps_per_execution=1), replay=False)
    assert torch.equal(w, plain) and state == state3
    why = {r for r in learn.xla_opt.replay.fit.plain if 'seeds random numbers' in r}
    assert bool(why) == (case in retraced), learn.xla_opt.replay.fit.plain

def test_a_step_recorded_whole_seeds():
    "With several steps as one the user's Python is traced once"
    (learn,w,_),(_,plain,_) = fitted(f=noise_of_one_seed, steps_per_execution=3),fitted(f=noise_of_one_seed, replay=False)
    assert torch.equal(w, plain)
    assert 'seeds random numbers' in str(dict(learn.xla_opt.replay.reasons.why))

def test_the_state_of_blocks_is_put_back():
    "What is drawn after the block is what would have been drawn without it"
    d = device()
    def after(block):
        set_seed(3)
        a = torch.rand(4, device=d)
        block()
        return torch.cat([a, torch.rand(4, device=d)]).cpu()
    def fork():
        with torch.random.fork_rng(): torch.manual_seed(1), torch.rand(2, device=d)
    def none():
        with no_random(): torch.rand(2, device=d)
    def seeds(): torch.manual_seed(1), torch.rand(2, device=d)
    want = after(noop)
    assert torch.equal(after(fork), want) and torch.equal(after(none), want)
    assert not torch.equal(after(seeds), want)

@pytest.mark.parametrize('on_xla', [dict(), dict(replay=False), None], ids=['replayed', 'retraced', 'cpu'])
def test_a_state_that_is_put_back_repeats_what_has_followed(on_xla):
    "Also one that was taken within a fit, and copied; with another state as control"
    torch.manual_seed(7)
    loaders = dls()
    learn,states = Learner(loaders, library_model(), loss_func=CrossEntropyLossFlat(), opt_func=SGD),{}
    if on_xla is not None: learn.to_xla(**on_xla)
    start = {k: v.detach().cpu().clone() for k,v in learn.model.state_dict().items()}
    def keeps(event): return lambda self: states.setdefault(event, torch.get_rng_state())
    cb = type('Cb', (Callback,), {e: keeps(e) for e in ('before_fit', 'before_epoch', 'before_train', 'after_fit')})
    def weights(state=None):
        learn.model.load_state_dict(start)
        loaders.train.rng.seed(3)
        if state is not None: torch.set_rng_state(torch.ByteTensor(state.numpy().copy()))
        with learn.no_logging(), learn.no_bar(): learn.fit(1, 1e-1, cbs=cb())
        return torch.cat([p.detach().cpu().flatten() for p in learn.model.parameters()])
    first,second = weights(),weights()
    assert not torch.equal(first, second)
    for event,state in states.items(): assert torch.equal(weights(state), second if event == 'after_fit' else first), event

@pytest.mark.filterwarnings('default')
def test_a_seed_after_each_of_several_steps():
    with pytest.warns(UserWarning, match='AfterEachBatch may seed random numbers after each'):
        _,w,state = fitted(AfterEachBatch, model=library_model, steps_per_execution=3)
    _,plain,state2 = fitted(AfterEachBatch, model=library_model)
    assert torch.equal(w, plain) and state == state2

class Seeds:
    def __len__(self): return 8
    def __getitem__(self, i):
        torch.manual_seed(i)
        with no_random(): return torch.rand(2)

def test_workers_seed_themselves():
    torch.manual_seed(40)
    state = rng_state()
    assert len(list(torch.utils.data.DataLoader(Seeds(), num_workers=2))) == 8
    assert rng_state() == state
    list(torch.utils.data.DataLoader(Seeds()))
    assert rng_state() == 7

@pytest.mark.parametrize('bad', ['a', 2**64, -2**63-1])
def test_a_bad_seed_is_torchs_error(bad):
    with pytest.raises((ValueError, RuntimeError)): torch.manual_seed(bad)

class NotesSeeds:
    "Items that seed in a way that their code does not show"
    def __init__(self, items): self.items,self.seen = items,[]
    def __len__(self): return len(self.items)
    def __getitem__(self, i):
        if (main := threading.current_thread() is threading.main_thread()) not in {m for m,_ in self.seen}:
            was = rng_state()
            vars(torch)['manual_'+'seed'](40)
            self.seen.append((main, rng_state() != was))
        return self.items[i]

def test_what_is_read_ahead_seeds_no_step():
    "In the thread that reads, a seed is the host's alone"
    ds = NotesSeeds([(torch.randn(8), torch.tensor(1))]*96)
    dls = DataLoaders.from_dsets(ds, ds, bs=8, shuffle=False, num_workers=0, device='cpu')
    learn = Learner(dls, library_model(), loss_func=CrossEntropyLossFlat()).to_xla()
    with learn.no_logging(), learn.no_bar(): learn.fit(2, 1e-2)
    assert dict(ds.seen) == {True: True, False: False}
