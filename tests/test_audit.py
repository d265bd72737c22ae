"A recording is checked against the code while it is replayed: what it does not see change is found at the next audit"
import warnings
from functools import lru_cache
from math import cos, pi
import pytest
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.capture.recording import Recording
from common import *

pytestmark = pytest.mark.usefixtures('recorded')

class Loss:
    "Weights by values of the learner that Python's C code consumes, where a number cannot be tracked"
    ws = [1., .5, .25, 2.]
    def __init__(self, f): self.f = f
    def __call__(self, pred, targ): return self.f(self, self.learn, F.cross_entropy(pred, targ))

def repeat(self, learn, loss):
    for _ in range(learn.epoch): loss = loss*.9
    return loss

by_epoch = dict(a_list=lambda o, learn, l: l*o.ws[learn.epoch],
    np_interp=lambda o, learn, l: l*float(np.interp(learn.epoch, [0, 3], [.5, 1.])),
    math_cos=lambda o, learn, l: l*cos(learn.epoch), a_loop=repeat)
def unchanged(o, learn, l): return l

def losses_of(f, n=3, replay=True, cbs=None, **kw):
    torch.manual_seed(0)
    loss = Loss(f)
    learn = image_learner(dls=image_dls(shuffle=False), loss_func=loss, cbs=cbs).to_xla(replay='auto' if replay else False, **kw)
    loss.learn = learn
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        with learn.no_bar(), learn.no_logging(): learn.fit(n, 1e-2)
    return tensor(learn.recorder.losses),[str(o.message) for o in told if 'audit' in str(o.message)],learn

@lru_cache
def retraced(f, n=3, notes=False):
    "Its losses, which are those of several tests"
    return losses_of(f, n, replay=False, cbs=Notes() if notes else None)[0]

@pytest.fixture
def numbers_unseen(monkeypatch):
    "One guard less: numbers that C code and containers take as they are go unseen"
    monkeypatch.setattr(Recording, '_taken', lambda self, inputs, most, keys: [])

@pytest.mark.parametrize('name', by_epoch)
def test_what_changes_by_epoch_is_never_stale(name, numbers_unseen):
    f = by_epoch[name]
    losses,told,learn = losses_of(f)
    assert torch.equal(losses, retraced(f))
    if name in ('np_interp', 'math_cos'):   # which the numbers themselves hear of
        assert not told
        return
    assert 'In training, epoch 1, batch 0, an audit found' in told[0]
    assert any('an audit found' in why for why in learn.xla_report().plain)

def test_without_audits_it_would_be_stale(without_audits, numbers_unseen):
    losses,told,_ = losses_of(by_epoch['a_list'])
    assert not told and not torch.allclose(losses, retraced(by_epoch['a_list']))

def test_a_change_within_an_epoch_is_found_at_the_next_power_of_two(numbers_unseen):
    f = lambda o, learn, l: l*o.ws[learn.train_iter//11]
    right,*_ = losses_of(f, n=3, replay=False)
    losses,told,learn = losses_of(f, n=3)
    differ = (losses != right).nonzero()[:, 0]
    assert differ[0] == 11   # the weights are others from then on
    assert len(told) and 'may have used an old value' in told[0]

def test_of_several_steps_as_one_the_first_is_traced_where_an_epoch_begins(numbers_unseen, monkeypatch):
    "All of them take longer than the epoch may: 8 steps of a small convnet were a tenth of its time"
    whole,audit = [],Recording.audit
    monkeypatch.setattr(Recording, 'audit', lambda self, inputs: whole.append(self.runs) or audit(self, inputs))
    f = lambda o, learn, l: l*o.ws[learn.epoch//3]
    right,*_ = losses_of(f, n=5, replay=False)
    losses,told,learn = losses_of(f, n=5, steps_per_execution=4)
    assert 'In training, epoch 3, batch 0, an audit found' in told[0]
    assert torch.allclose(losses, right, atol=1e-6)
    assert 6 not in whole and {2, 4} <= {*whole}   # two executions are an epoch, and the third began with the first step alone

def test_audits_of_a_step_that_does_not_change_cost_nothing_else():
    _,told,learn = losses_of(unchanged, n=4)
    audits,report = learn.xla_opt.replay.fit.audits,learn.xla_report()
    assert not told and not report.plain
    assert audits == {True: 2+3, False: 1+3}   # at the 2nd and 4th batch of 8, at the 2nd of 4, and where epochs begin
    assert report.per_batch() | {'to device': 0} == {'compiles': 0, 'executions': 1, 'to host': 0, 'to device': 0, 'fallbacks': 0}

def test_what_decides_in_one_recording_is_not_looked_for_in_the_next(monkeypatch):
    "By halves, that is: one look at all other numbers is enough"
    looks,differs = [],Recording._differs
    monkeypatch.setattr(Recording, '_differs', lambda self, *args: looks.append(self) or differs(self, *args))
    losses,*_ = losses_of(by_epoch['a_list'])
    assert torch.equal(losses, retraced(by_epoch['a_list']))
    n = [looks.count(rec) for rec in dict.fromkeys(looks)]
    assert len(n) == 2*3 and min(n[:2]) > 1 and n[2:] == [1]*4, n   # training and validation, in three epochs

class Notes(Callback):
    "The learner has a number more after the first epoch"
    def after_epoch(self): self.learn.best = self.epoch + 1.

@pytest.mark.parametrize('k', (1, 4))
@pytest.mark.parametrize('f,reads', [(unchanged, False), (lambda o, learn, l: l*getattr(learn, 'best', .5), True)])
def test_a_number_that_an_object_gets_after_the_recording(f, reads, k):
    "It is no other step, unless that reads it"
    losses,told,learn = losses_of(f, n=4, steps_per_execution=k, cbs=Notes())
    assert torch.allclose(losses, retraced(f, 4, notes=True), atol=1e-6)
    assert bool(told or learn.xla_report().plain) == reads
    assert learn.xla_opt.replay.fit.audits[True] >= (1 if reads else 3)

class Turns(Callback):
    def before_fit(self): self.learn.alpha = 1/3
    def after_batch(self): self.learn.alpha = 1 - self.alpha

def test_a_number_that_one_of_those_that_torch_is_shown_would_give_too(without_audits):
    "cos is .5 for 1/3, -.5 for 2/3, and .5 again for 2/3 and an odd number"
    f = lambda o, learn, l: l*(2 + cos(pi*learn.alpha))
    assert torch.equal(losses_of(f, replay=False, cbs=Turns())[0], losses_of(f, cbs=Turns())[0])

@pytest.mark.parametrize('k', (1, 4))
def test_a_number_that_has_become_a_constant_in_float32_is_no_other_step(k):
    "The recorder divides its mean of losses by `1-.8**n`: to torch that is 1 from the 78th batch on, and near it several are one number"
    dls = image_dls(n=32*2, n_valid=16, bs=2, shuffle=False)
    learn = image_learner(dls=dls, metrics=[]).to_xla(steps_per_execution=k)
    learn.recorder.smooth_loss.beta = .8   # .98 in fastai, where it takes hundreds of batches
    with warnings.catch_warnings(record=True) as told, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(4, 1e-3)
    report = learn.xla_report()
    assert not [w for w in told if 'audit' in str(w.message)] and not report.plain
    assert 1/k <= report.per_batch()['executions'] < 1/k + .01 and len(learn.recorder.losses) == 4*32

@pytest.mark.parametrize('loss', [CrossEntropyLossFlat(), lambda p, t: F.cross_entropy(p, t)])
def test_functions_of_the_users_are_watched_where_there_are_any(loss):
    "The profiler's hook is three quarters of an audit's time"
    learn = image_learner(loss_func=loss).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
    recs = [r for recs in learn.xla_opt.replay.kinds.recs.values() for r in recs]
    assert len(recs) == 2 and sum(learn.xla_opt.replay.fit.audits.values()) > 0
    assert all(r.guards.users == (not isinstance(loss, CrossEntropyLossFlat)) for r in recs)

# A buffer that is on the CPU for a while

class Scaled(nn.Module):
    "An ActNorm in miniature, whose first forward pass sets a buffer up"
    def __init__(self, reads):
        super().__init__()
        self.reads,self.again,self.net,self.log_scale = reads,False,convnet(),nn.Parameter(torch.zeros(()))
        self.register_buffer('scale', torch.zeros(()))
    def forward(self, x):
        if self.reads and not self.scale > 0:
            self.log_scale.data = -x.std().log().data
            self.scale = torch.tensor(1.)
        return self.net(x*self.scale*self.log_scale.exp())

class Sets(Callback):
    "Puts a tensor on the CPU in the place of the buffer where a step is about to be recorded again, and may write to it"
    def __init__(self, writes): self.writes = writes
    def after_batch(self):
        model = self.learn.model
        if not self.training or self.epoch: return
        if self.iter == 1: model.scale,model.again = torch.tensor(1.),True
        if self.iter == 4 and self.writes: model.scale.fill_(2.)

def scaled(replay, reads=False, cbs=None):
    torch.manual_seed(0)
    learn = Learner(image_dls(shuffle=False), Scaled(reads), loss_func=CrossEntropyLossFlat(), cbs=cbs, opt_func=SGD).to_xla(replay=replay)
    with warnings.catch_warnings(record=True) as told, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(3, 1e-2)
    return learn,[str(o.message) for o in told if 'audit' in str(o.message)]

@lru_cache
def scaled_losses(reads=False, writes=None):
    "Of retraced steps"
    return tensor(scaled(False, reads, None if writes is None else Sets(writes))[0].recorder.losses)

@pytest.mark.parametrize('audits', [False, True])
@pytest.mark.parametrize('writes', [False, True])
def test_a_buffer_that_is_moved_between_epochs_is_no_alarm(request, writes, audits):
    if not audits: request.getfixturevalue('without_audits')
    learn,told = scaled('auto', cbs=Sets(writes))
    assert not told and not learn.xla_report().plain and is_xla(learn.model.scale)
    assert torch.allclose(tensor(learn.recorder.losses), scaled_losses(writes=writes), rtol=1e-5)

@pytest.mark.parametrize('log', [False, True])
def test_a_buffer_that_the_first_forward_pass_sets(log, monkeypatch):
    "Each step reads it, and the report names the line. The first two of each phase are tries"
    if log: monkeypatch.undo()   # as without `recorded`
    learn,told = scaled('auto', reads=True)
    assert not told and is_xla(learn.model.scale) and learn.model.scale == 1
    assert torch.equal(tensor(learn.recorder.losses), scaled_losses(reads=True))
    plain = learn.xla_report().plain
    if log: assert [n for why,n in plain.items() if 'Tensor.__bool__ at test_audit.py, line' in why] == [3*(8+4) - 2*2] and len(plain) == 1
    else: assert len(plain) == 1 and 'is read within the step, in ' in (why := first(plain)) and 'at test_audit.py, line' in why
