"Learners with code of the user's: it runs at every step, only the device's work is replayed; the same numbers as retraced steps"
import os, random
from copy import deepcopy
from typing import Optional
import own_process, pytest, torch, torch.nn.functional as F
from torch import nn
from fastai_xla.graphs import compile_graph
from fastai_xla.capture.known import KnownModule
from fastai_xla.logged import unknown_code
from by_log import *

# --- numbers that Python code computes in any way

@pytest.mark.parametrize('how', ['list', 'interp', 'iter', 'int', 'float32', 'host tensor', 'sent tensor', 'changed'])
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

def test_a_distribution_reads_what_it_is_given():
    "What to type is told"
    def nll(p, t): return -torch.distributions.Normal(p, 1., validate_args=True).log_prob(t).mean()
    whys = same(lambda: dict(loss_func=lambda: nll), 1e-6).xla_report().plain
    assert whys and all('with `validate_args=False` it does not' in why for why in whys), whys

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
