"Learners with code of the user's: it runs at every step, only the device's work is replayed; the same numbers as retraced steps"
import dataclasses, math, os, random
from copy import deepcopy
from functools import partial
from math import cos, pi
from types import SimpleNamespace
from typing import Optional
import numpy as np, own_process, pytest, torch, torch.nn.functional as F
from torch import nn
from fastai.basics import *
from fastai.callback.all import *
from fastai_xla.all import *
from fastai_xla.graphs import compile_graph
from fastai_xla.seeds import manual_seed
from fastai_xla.runtime import device
from fastai_xla.capture.known import KnownModule
from fastai_xla.logged import unknown_code

def items(n=192):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(n, 6, generator=g)
    return list(zip(x, x[:,:1]*2 - x[:,1:2]*x[:,2:3]))

def data(): return DataLoaders.from_dsets(items()[:160], items()[160:], bs=16, num_workers=0)
def mlp(o=1): return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, o))

def host(o):
    if isinstance(o, torch.Tensor): return o.detach().cpu().as_subclass(torch.Tensor).clone()
    if isinstance(o, dict): return {k: host(v) for k,v in o.items()}
    return [host(v) for v in o] if isinstance(o, (list, tuple, L)) else o

def leaves(o):
    if isinstance(o, dict): o = list(o.values())
    return [l for v in o for l in leaves(v)] if isinstance(o, (list, tuple)) else [o]

def run(story, replay, xla=True, n=3):
    "A fit of a story: what it leaves, and the learner"
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    manual_seed(3)
    kwargs = dict(model=mlp, loss_func=nn.MSELoss, cbs=list, see=lambda learn: None) | story()
    see,model,loss,cbs = (kwargs.pop(k) for k in ('see', 'model', 'loss_func', 'cbs'))
    learn = Learner(kwargs.pop('dls', data)(), model(), loss_func=loss(), **kwargs)
    if xla: learn.to_xla(replay=replay)
    with learn.no_bar(), learn.no_logging(): learn.fit(n, 1e-2, cbs=cbs())
    left = dict(losses=[float(o) for o in learn.recorder.losses], values=[[float(v) for v in r] for r in learn.recorder.values],
                sd=host(learn.model.state_dict()), see=host(see(learn)))
    return left,learn

def counts(learn): return learn.xla_opt.replay.by_log.fit.counts

def agree(story, branches=1, valid=1, tol=0., cpu=True, n=3):
    "Replayed as retraced, and as on the CPU; traced only where a path is new"
    (a,_),(b,learn) = run(story, False, n=n),run(story, 'auto', n=n)
    for k in a:
        for x,y in zip(leaves(a[k]), leaves(b[k]), strict=True):
            if isinstance(x, torch.Tensor): torch.testing.assert_close(x, y, rtol=tol, atol=tol)
            elif isinstance(x, float): assert x == y or abs(x-y) <= tol*max(1, abs(x)), (k, x, y)
            else: assert x == y, (k, x, y)
    train,val = counts(learn)[True],counts(learn)[False]
    if branches is not None:
        assert train['traced'] == branches and not train['refused'], (train, learn.xla_opt.replay.reasons.why)
        assert train['replayed'] == 10*n - branches
        if valid is not None: assert (val['traced'], val['refused']) == (valid, 0)
    if cpu:
        c,_ = run(story, False, xla=False, n=n)
        test_close(b['losses'], c['losses'], eps=1e-4*max(1, max(c['losses'])))
    return learn

# --- numbers that Python code computes in any way

class Weight(Callback):
    "The loss times a number"
    ws = [1., .5, .1]
    def __init__(self, how): self.how,self.host = how,torch.linspace(1, .1, 3)
    def number(self, e):
        if self.how == 'list': return self.ws[e]
        if self.how == 'interp': return np.interp(e, [0, 2], [1., .1])
        if self.how == 'cos': return .5*(1 + cos(pi*e/self.n_epoch))
        if self.how == 'and': return .5 if e & 1 else 1.
        if self.how == 'floor': return 1 + math.floor(e/2)
        if self.how == 'ramp from 1': return max(.1, 1 - .4*e)
        if self.how == 'linspace': return torch.linspace(1, .1, 3)[e].item()
        if self.how == 'iter': return 1 + .01*self.train_iter
        if self.how == 'int': return 1 + e
        if self.how == 'float32': return np.float32(1/(1+e))
        if self.how == 'host tensor': return self.host[e]
        if self.how == 'sent tensor': return self.host[e].to(self.learn.loss.device)
        self.host.data[0] = 1 + .1*self.iter   # no version is bumped
        return self.host.to(self.learn.loss.device)[0]
    def after_loss(self):
        self.learn.loss_grad = self.learn.loss_grad*self.number(self.epoch)
        self.learn.loss = self.learn.loss_grad.clone()

hows = ['list', 'interp', 'cos', 'and', 'floor', 'ramp from 1', 'linspace', 'iter', 'int', 'float32', 'host tensor', 'sent tensor',
        'changed']
@pytest.mark.parametrize('how', hows)
def test_a_number(how):
    learn = agree(lambda: dict(cbs=lambda: Weight(how)), cpu=how != 'sent tensor' and how != 'changed')
    assert not learn.xla_opt.replay.fit.plain

class Range(Callback):
    def after_loss(self):
        for _ in range(self.epoch): self.learn.loss_grad = self.learn.loss_grad*.5
        self.learn.loss = self.learn.loss_grad.clone()

def test_a_range_is_a_branch_for_each_length():
    learn = agree(lambda: dict(cbs=Range), branches=3, valid=3)
    assert any('torch.Tensor.mul' in why for why in learn.xla_opt.replay.reasons.why)

class TopK(Callback):
    def before_epoch(self): self.k = 4 + 4*self.epoch
    def after_pred(self): self.learn.pred = self.learn.pred.topk(self.k, 1)[0].mean(1, keepdim=True)

def test_top_k_of_training_and_validation():
    learn = agree(lambda: dict(model=lambda: mlp(16), cbs=TopK), branches=3, valid=3)
    assert any('has another argument: 4 -> 8' in why for why in learn.xla_opt.replay.reasons.why)

class Kept(Callback):
    "A queue of predictions, whose mean is added to the loss"
    def __init__(self, computed): self.computed = computed
    def before_fit(self): self.queue,self.at = None,0
    def after_loss(self):
        p = self.pred.detach()
        if self.queue is None: self.queue = torch.zeros(4*len(p), *p.shape[1:], device=p.device)
        if self.computed: self.queue[torch.arange(len(p), device=p.device) + self.at] = p
        else: self.queue[self.at:self.at+len(p)] = p
        self.at = (self.at + len(p)) % len(self.queue)
        self.learn.loss_grad = self.learn.loss_grad*(1 + self.queue.mean()**2)
        self.learn.loss = self.learn.loss_grad.clone()

def test_a_place_that_moves():
    "A slice is another program at each place, and the report says what is one"
    learn = agree(lambda: dict(cbs=lambda: Kept(False)), branches=None, valid=None, tol=1e-6)
    why = [why for why in learn.xla_opt.replay.reasons.why if 'another argument' in why]
    assert why and all('torch.arange(n, device=t.device) + i' in o for o in why), why
    plain = agree(lambda: dict(cbs=lambda: Kept(True)), branches=2, valid=None)
    assert not plain.xla_opt.replay.fit.plain

def projected(pred, targ):
    "Two losses in a random order, as where gradients of tasks are projected"
    losses = [(pred-targ).square().mean(), (pred-targ).abs().mean()]
    random.shuffle(losses)
    return losses[0] + losses[1].detach()*losses[0]

def test_another_tensor_is_named_as_one():
    "Not by its number in the recording, which nobody has written"
    learn = agree(lambda: dict(loss_func=lambda: projected), branches=2, valid=2)
    assert any('has another argument: a tensor that was used before -> another one' in why for why in learn.xla_opt.replay.reasons.why)

class Drop(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.p = nn.Linear(6, 16),nn.Linear(16, 1),0.
    def forward(self, x): return self.b(F.dropout(self.a(x).relu(), p=self.p, training=self.training))
class DropMore(Callback):
    def before_epoch(self): self.model.p = .2*self.epoch

def test_dropout_by_the_epoch(): agree(lambda: dict(model=Drop, cbs=DropMore), branches=3, valid=3, cpu=False)

class Clip(Callback):
    def after_backward(self): nn.utils.clip_grad_norm_(self.model.parameters(), [1., .1, .01][self.epoch])

def test_clipping_by_a_list(): agree(lambda: dict(cbs=Clip), branches=None, tol=1e-6)

# --- modules of libraries that are held by something else

class PlainLoss:
    "Not a module, and holds one"
    def __init__(self): self.ce = nn.Sequential(nn.Dropout(0.), nn.Identity())
    def __call__(self, p, y): return F.mse_loss(self.ce(p), y)
class Louder(Callback):
    def before_epoch(self): self.learn.loss_func.ce[0].p = .3*self.epoch

def test_a_module_held_by_a_plain_loss():
    learn = agree(lambda: dict(loss_func=PlainLoss, cbs=Louder), branches=3, valid=3, cpu=False)
    assert any('Sequential' in why for why in learn.xla_opt.replay.reasons.why)

class Teacher(Callback):
    "An average of the weights, in training mode in one epoch"
    def before_fit(self): self.t = deepcopy(self.model).eval()
    def before_epoch(self): self.t.train(self.epoch == 1)
    def after_loss(self):
        if not self.training: return
        with torch.no_grad(): q = self.t(self.x)
        self.learn.loss_grad = self.learn.loss_grad + .3*(self.learn.pred-q).pow(2).mean()*(1+self.iter/10)
    def after_step(self):
        with torch.no_grad():
            for a,b in zip(self.t.parameters(), self.model.parameters()): a.lerp_(b, .1)

def with_dropout(): return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(.2), nn.Linear(16, 1))
def test_a_teacher(): agree(lambda: dict(model=with_dropout, cbs=Teacher), branches=2, cpu=False)

# --- optimizers

class SecondOptimizer(Callback):
    def before_fit(self): self.o = torch.optim.Adam(self.model[2:].parameters(), lr=1e-3)
    def after_step(self): self.o.step()
    def after_epoch(self): self.o.param_groups[0]['lr'] *= .5
def test_a_second_optimizer(): agree(lambda: dict(cbs=SecondOptimizer), branches=None)

class TorchSchedule(Callback):
    "Steps after the optimizer, within the step"
    def before_fit(self): self.s = torch.optim.lr_scheduler.StepLR(self.opt.opt, 4, .5)
    def after_step(self): self.s.step()
def test_a_schedule_that_steps_within_the_step():
    agree(lambda: dict(opt_func=partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9), cbs=TorchSchedule))

class Sam(Callback):
    def after_backward(self):
        ps = list(self.model.parameters())
        n,es = torch.stack([p.grad.norm() for p in ps]).norm(),[]
        with torch.no_grad():
            for p in ps:
                e = p.grad*(.05/(n+1e-12))
                p.add_(e)
                es.append(e)
        self.model.zero_grad()
        self.learn.loss_func(self.model(*self.xb), *self.yb).backward()
        with torch.no_grad():
            for p,e in zip(ps, es): p.sub_(e)
def test_sharpness_aware_minimisation(): agree(lambda: dict(cbs=Sam), tol=1e-6)

class Freeze(Callback):
    def before_epoch(self): self.model[0].weight.requires_grad_(self.epoch != 1)
def keep(x): return x
def test_freezing(): agree(lambda: dict(loss_func=lambda: lambda p,y: F.mse_loss(keep(p), y), cbs=Freeze), branches=2, valid=2, cpu=False)

# --- who holds results after the step

class Keeps(Callback):
    "A list of (step, loss), a deque, a closure, a namespace"
    def before_fit(self): self.all,self.rare,self.fs,self.prev = [],[],[],None
    def after_loss(self):
        l = self.learn.loss.detach()
        self.all.append((self.iter, l))
        if self.iter == 5 and self.epoch == 1: self.rare.append(self.learn.pred.detach()*2)
        v = l*3
        self.fs.append(lambda: v)
        self.ns = SimpleNamespace(d={'z': [self.learn.pred.detach()]})
        if self.prev is not None and self.training: self.learn.loss_grad = self.learn.loss_grad + .01*self.prev
        self.prev = l

def test_results_that_somebody_holds():
    cbs = []
    def story():
        cbs.append(Keeps())
        return dict(cbs=lambda: cbs[-1], see=lambda learn: (lambda c: [c.all, c.rare, [f() for f in c.fs], c.ns.d])(cbs[-1]))
    agree(story, branches=3)   # the first, those with one before, the rare one
    assert len({float(l) for _,l in cbs[1].all}) == 36   # each step its own

@dataclasses.dataclass
class Out: a: object; b: object; n: int = 0
class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.a,self.b,self.kind = nn.Linear(6, 16),nn.Linear(16, 1),kind
    def forward(self, x):
        h = self.a(x).relu()
        self.acts = dict(h=h.detach())
        return Out(self.b(h), h, len(x)) if self.kind == 'dataclass' else AttrDict(a=self.b(h), b=h)
class Looks(Callback):
    def before_fit(self): self.seen = []
    def after_batch(self): self.seen.append(self.learn.pred.b.detach().mean().item())
def out_loss(p, t): return F.mse_loss(p.a, t) + .01*p.b.pow(2).mean()

@pytest.mark.parametrize('kind', ['dataclass', 'AttrDict'])
def test_a_model_that_returns_an_object(kind):
    cbs = []
    def story():
        cbs.append(Looks())
        return dict(model=partial(Returns, kind), loss_func=lambda: out_loss, cbs=lambda: cbs[-1],
                    see=lambda learn: [cbs[-1].seen, learn.model.acts])
    agree(story)

# --- random numbers, branches

class HostRandom(Callback):
    "As MixUp: draws of numpy, of `random` and of torch on the host"
    run_valid = False
    def after_pred(self):
        q,n = self.learn.pred,len(self.x)
        lam,p,w = float(np.random.beta(.4, .4)),torch.randperm(n).to(q.device),torch.tensor(random.random()).to(q.device)
        self.learn.pred = (q*lam + q[p]*(1-lam))*w + .01*torch.rand(n, 1).to(q.device)
def test_random_numbers_of_the_host(): agree(lambda: dict(cbs=HostRandom))

class DeviceRandom(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(6, 16),nn.Linear(16, 1)
    def forward(self, x):
        h = F.dropout(self.a(x + .1*torch.randn_like(x)).relu(), .3, self.training)
        return self.b(h*(torch.rand(len(x), 1, device=x.device) < .9))
def test_random_numbers_of_the_device(): agree(lambda: dict(model=DeviceRandom), cpu=False)

class StochasticDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.m = nn.Linear(6, 16),nn.Linear(16, 1),nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
    def forward(self, x):
        h = self.a(x)
        for m in self.m:
            if not self.training or random.random() < .5: h = h + m(h).relu()
        return self.b(h)
def test_a_branch_for_each_depth():
    learn = agree(lambda: dict(model=StochasticDepth), branches=None, n=4)
    assert counts(learn)[True]['compiled'] <= 6 and counts(learn)[True]['replayed'] >= 32

def test_accumulated_gradients():
    def loss(p, y): return F.mse_loss(keep(p), y)
    agree(lambda: dict(loss_func=lambda: loss, cbs=lambda: GradientAccumulation(40)), branches=None, tol=1e-6, cpu=False)   # other outputs

# --- what is not replayed

class Reads(Callback):
    def __init__(self, when): self.when = when
    def before_fit(self): self.seen = []
    def after_loss(self):
        if self.when(self): self.seen.append(self.learn.loss.item())

def test_a_value_that_is_read_at_each_step_is_retraced():
    learn = agree(lambda: dict(cbs=lambda: Reads(lambda cb: True)), branches=None)
    r = learn.xla_opt.replay
    assert counts(learn) == {True: {'refused': 2, 'retraced': 28}, False: {'refused': 2, 'retraced': 4}}   # no attempt to record it
    assert all('reads a value' in why for why in r.by_log.fit.off.values()) and len(r.by_log.fit.off) == 2
    assert any(why.startswith('torch.Tensor.item at test_log.py, line ') and 'reads a value' in why for why in r.reasons.why)
    assert sum(r.fit.plain.values()) == 3*(10+2) - 2*2

def test_a_value_that_is_read_once():
    learn = agree(lambda: dict(cbs=lambda: Reads(lambda cb: cb.epoch == 1 and cb.iter == 3)), branches=None)
    assert (counts(learn)[True]['replayed'], counts(learn)[True]['refused']) == (28, 1)

class BackwardHook(Callback):
    def before_fit(self): self.h = self.model[0].weight.register_hook(lambda g: g*(1+self.epoch))
    def after_fit(self): self.h.remove()
def test_steps_with_a_hook_in_the_backward_pass_are_retraced():
    learn = agree(lambda: dict(cbs=BackwardHook), branches=None)
    log = learn.xla_opt.replay.by_log
    assert 'runs in the backward pass' in log.fit.off[True] and counts(learn)[True]['replayed'] == 0
    assert learn.xla_opt.replay.fit.plain[log.fit.off[True]] == 28 and counts(learn)[False]['replayed']

# --- what it costs, and whom it concerns

def test_one_execution_no_compile_no_transfer_to_host():
    _,learn = run(lambda: dict(cbs=lambda: Weight('iter')), 'auto', n=4)
    report = learn.xla_report()
    for phase in ('training', 'validation'):
        c = report.per_batch(phase)
        assert (c['compiles'], c['executions'], c['to host'], c['fallbacks']) == (0, 1, 0, 0), (phase, c)
        assert c['to device'] <= 2   # the batch; numbers and what the step sends
    assert report.steady['of'].tolist()[0] == 40-2-7 and not learn.xla_opt.replay.fit.plain

def test_a_program_takes_over_the_memory_of_what_it_updates(monkeypatch):
    "Else each step that waits for the device would hold another copy of the weights"
    from fastai_xla.capture import program
    given = []
    def compiled(roots, donated=()): return given.append(len(donated)) or compile_graph(roots, donated)
    monkeypatch.setattr(program, 'compile_graph', compiled)
    _,learn = run(lambda: dict(cbs=lambda: Weight('iter'), opt_func=partial(SGD, mom=.9)), 'auto')
    n = len(list(learn.model.parameters()))
    assert given == [2*n, 1]   # weights and their averages; in validation the sum of losses

def test_a_program_that_torch_xla_has_dropped_is_made_again(tmp_path):
    code = f"""
import test_log as t
story = lambda: dict(cbs=lambda: t.Weight('iter'))
(a,_),(b,learn) = t.run(story, False),t.run(story, 'auto')
assert a['losses'] == b['losses'] and a['values'] == b['values']
assert t.counts(learn)[True]['compiled'] > 1 and t.counts(learn)[True]['replayed'] > 20, t.counts(learn)"""
    res = own_process.run(['-c', code], tmp_path, Path(__file__).parent, os.environ | dict(XLA_COMPILATION_CACHE_SIZE='2'))
    assert not res.returncode, res.stderr

def test_learners_of_libraries_are_recorded_as_before():
    _,learn = run(lambda: {}, 'auto')
    assert not unknown_code(learn) and learn.xla_opt.replay.by_log is None
    assert not learn.xla_opt.replay.fit.plain

class Sloped(PlainLoss):
    def __init__(self): self.ce = nn.Sequential(nn.LeakyReLU(.1), nn.Identity())
class Steeper(Callback):
    def before_epoch(self): self.learn.loss_func.ce[0].negative_slope = .1 + .3*self.epoch

@pytest.mark.parametrize('loss,cb,found', [(PlainLoss, Louder, 'Sequential gives a new tensor'),
                                           (Sloped, Steeper, 'a constant of it was 0.1.*, and is 0.4')])
def test_an_audit_finds_what_a_guard_has_missed(loss, cb, found, monkeypatch):
    monkeypatch.setattr(KnownModule, 'guard', lambda self: [])
    with pytest.warns(UserWarning, match=f'an audit found that the step is not what was recorded: {found}'):
        _,learn = run(lambda: dict(loss_func=loss, cbs=cb), 'auto')
    r = learn.xla_opt.replay
    assert counts(learn)[True]['replayed'] == 9 and r.fit.audits[True] == 4   # after 2, 4 and 8 batches, and at the first of epoch 1
    assert {why: n for why,n in r.fit.plain.items() if 'an audit found' in why} == {first(r.fit.plain): 20 + 4}

@torch.jit.script
def scaled_step(p:torch.Tensor, g:torch.Tensor, lr:float, avg:Optional[torch.Tensor]=None):
    if avg is None: avg = torch.zeros_like(p)
    avg.mul_(.9).add_(g)
    p.add_(avg, alpha=-lr)
    return avg

class Scripted(Optimizer):
    "A scheduled number that nobody can track, and an argument that comes with the second step"
    def __init__(self, params, lr): super().__init__(params, [None], lr=lr)
    @torch.no_grad()
    def step(self, closure=None):
        for p,_,state,hyper in self.all_params(with_grad=True):
            state['avg'] = scaled_step(p, p.grad, hyper['lr'], *map(state.get, {'avg'} & {*state}))

def test_batches_that_are_retraced_have_their_own_reason_and_are_steady():
    "Not that of the second step"
    _,learn = run(lambda: dict(opt_func=Scripted, cbs=lambda: [ParamScheduler({'lr': SchedLin(.01, .1)})]), 'auto')
    report = learn.xla_report()
    plain = [(n, why) for why,n in report.plain.items() if 'scaled_step at test_log.py' in why]
    assert [n for n,_ in plain] == [1, 28] and '3 things -> 4 things' in plain[0][1] and 'has another argument: 0.0' in plain[1][1]
    # without the first three, and the first that is not logged
    assert len(report.plain) == 2 and report.log.n_steady('training') == 30 - 3 - 1

def copied(net):
    "A loss that copies a network in each step"
    def loss(pred, targ): return F.mse_loss(pred, targ) + deepcopy(net)(pred).mean()
    return loss

def test_another_module_of_the_same_class_is_said_to_be():
    def story():
        net = nn.Sequential(nn.Linear(1, 1), nn.Tanh()).to(device())
        return dict(loss_func=lambda: copied(net))
    _,learn = run(story, 'auto')
    line = f'test_log.py, line {copied.__code__.co_firstlineno+2}'
    assert f'Sequential at {line} is another Sequential than the one that was called there before' in learn.xla_report().plain
