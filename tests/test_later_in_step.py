"""What a callback changes within a step, after it has been used there, counts from the next step on

Each fit as fastai on the CPU: losses, weights, and what is counted"""
from pathlib import Path
import own_process, pytest
from dataclasses import dataclass
import fastai.optimizer
import torch.nn.functional as F
from order_of_steps import *

def net(): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

def acting(event, act, at=(1, 3, 6), valid=False):
    "A callback that acts at some batches"
    def f(self):
        if self.training != valid and (self.iter if valid else self.train_iter) in at: act(self)
    return type('Acts', (Callback,), {event: f})

def agrees(make, tos=(dict(replay='auto'),), eps=1e-4):
    want = left(make)[0]
    for to in tos:
        for a,b in zip(*map(leaves, (want, left(make, **to)[0])), strict=True):
            torch.testing.assert_close(*map(torch.as_tensor, (b, a)), rtol=10*eps, atol=eps, check_dtype=False)

# --- what known modules and optimizers are made of

def another_layer(cb): cb.model[1] = nn.GELU() if isinstance(cb.model[1], nn.ReLU) else nn.ReLU()
def another_and_a_look(cb):
    another_layer(cb)
    float(cb.loss)
def another_class(cb): cb.model[1].__class__ = nn.Tanh
def a_layer_more(cb): cb.model.append(nn.Tanh())
def a_hook(cb): cb.model[0].register_forward_hook(lambda m, x, y: y*.9)
def without_decay(cb): cb.opt.cbs = L(f for f in cb.opt.cbs if f is not weight_decay)
def nesterov(cb): cb.opt.opt.param_groups[0]['nesterov'] ^= True
def another_weight(cb):
    m = cb.model[2]
    m.weight = nn.Parameter(m.weight.detach()*.5 + .01)
    cb.opt.param_lists[0] = L(cb.model.parameters())
def another_keyword(cb): cb.model[1].func.keywords['negative_slope'] += .2

def leaky():
    m = net()
    m[1] = Lambda(partial(F.leaky_relu, negative_slope=.1))
    return m

later = dict(layer=('after_step', another_layer, {}), layer_after_loss=('after_loss', another_layer, {}),
    looks=('after_step', another_and_a_look, {}), cls=('after_step', another_class, {}), more=('after_pred', a_layer_more, {}),
    hook=('after_loss', a_hook, {}), decay=('after_step', without_decay, dict(wd=.5)),
    keyword=('after_loss', another_keyword, dict(model=leaky)),
    nesterov=('after_step', nesterov, dict(opt_func=partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=.9)))),
    weight=('after_step', another_weight, {}), weight_of_adam=('after_step', another_weight, dict(opt_func=Adam)),
    validation=('after_pred', another_layer, dict(valid=True)))

@pytest.mark.parametrize('name', later)
def test_what_a_step_has_used_changes_later_in_it(name):
    event,act,kwargs = later[name]
    kwargs = dict(opt_func=SGD, model=net) | kwargs
    valid = kwargs.pop('valid', False)
    agrees(lambda: learner(cbs=acting(event, act, (1,) if valid else (1, 3, 6), valid)(), **kwargs))

# --- the optimizer's state and parameters

def replaces(cb):
    for p in cb.model.parameters():
        if 'grad_avg' in (s := cb.opt.state[p]): s['grad_avg'] = s['grad_avg']*.9

@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'before_step'])
def test_a_state_is_replaced(event):
    def see(learn): return [learn.opt.state[p]['grad_avg'] for p in learn.model.parameters()]
    agrees(lambda: learner(cbs=acting(event, replaces, range(99))(), see=see))

def test_a_checkpoint_is_loaded_at_some_steps(tmp_path):
    def act(cb): (cb.learn.save if cb.train_iter == 2 else cb.learn.load)('m')
    agrees(lambda: learner(cbs=acting('before_batch', act, (2, 4, 6, 8))(), path=tmp_path))

@pytest.mark.parametrize('event', ['before_batch', 'after_step', 'after_batch'])
def test_a_layer_and_the_optimizer_are_begun_anew(event):
    def act(cb):
        new = nn.Linear(8, 1)
        for p in new.parameters(): nn.init.constant_(p, .01*cb.train_iter)
        cb.model[2] = new.to(cb.dls.device)
        cb.learn.create_opt()
        cb.opt.set_hyper('lr', 5e-3)
    agrees(lambda: learner(cbs=acting(event, act, (3, 5, 7, 9))(), model=net))

def in_place(cb):
    cb.model[2].weight = nn.Parameter(cb.model[2].weight.detach()*.5 + .01)
    cb.opt.param_lists[0][2] = cb.model[2].weight

def test_a_weight_in_the_optimizers_list_of_several_steps(tmp_path):
    "It ended the process: in a process of its own"
    code = ("import conftest; from test_later_in_step import *\n"
            "agrees(lambda: learner(cbs=acting('after_step', in_place, (5,))(), model=net), [dict(steps_per_execution=3)])")
    res = own_process.run(['-c', code], tmp_path, Path(__file__).parent)
    assert not res.returncode, res.stderr

# --- a class method of an autograd function, and a batch that a callback does by itself

class Reverse(torch.autograd.Function):
    by,n = 0.,0
    @staticmethod
    def forward(ctx, x): return x.clone()
    @classmethod
    def backward(cls, ctx, g): cls.n += 1; return -g*cls.by
class Reverses(nn.Module):
    def __init__(self): super().__init__(); self.l,self.out = nn.Linear(6, 8),nn.Linear(8, 1)
    def forward(self, x): return self.out(self.l(x)) + Reverse.apply(self.l(x)).sum(1, keepdim=True)
class Sets(Callback):
    def before_fit(self): Reverse.by,Reverse.n = 0.,0
    def before_batch(self): Reverse.by = .3*(self.train_iter%3)

def test_a_backward_that_is_a_class_method():
    agrees(lambda: learner(model=Reverses, cbs=Sets(), opt_func=SGD, see=lambda l: [Reverse.n]))

class DoesTheBatch(Callback):
    def before_batch(self):
        if not self.training: return
        self.learn.loss = self.learn.loss_grad = F.mse_loss(self.model(self.x), self.y)
        self.learn.loss.backward()
        self.opt.step(), self.opt.zero_grad()
        raise CancelBatchException

def test_a_callback_does_the_batch_and_leaves_no_prediction():
    agrees(lambda: learner(cbs=DoesTheBatch(), metrics=[]), [dict(replay='auto'), dict(replay=False)])

# --- the weight of a loss around which MixUp has put its own

@pytest.mark.parametrize('mix', [MixUp, CutMix])
def test_a_loss_with_weights_beside_mixup_is_recorded(mix):
    x,y = torch.rand(64, 3, 8, 8),torch.randint(4, (64,))
    dls = DataLoaders.from_dsets(*[list(zip(x, y))]*2, bs=16, num_workers=0)
    loss = CrossEntropyLossFlat(weight=torch.tensor([1., 2., .5, 1.]))
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), loss_func=loss, cbs=mix()).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
    report = learn.xla_report()
    assert not report.plain and report.steady.loc['training batch', 'executions'] == '1.00'

def test_zero_grad_asks_for_the_parameters_once():
    "As fastai does, on the CPU and on XLA: a user's `all_params` may be another each time"
    class Counts(Optimizer):
        n = 0
        def all_params(self, *args, with_grad=False, **kwargs):
            self.n += with_grad
            return super().all_params(*args, with_grad=with_grad, **kwargs)
    def opt_func(ps, lr, **kwargs): return Counts(ps, [fastai.optimizer.sgd_step], lr=lr)
    agrees(lambda: learner(opt_func=opt_func, see=lambda l: [l.opt.n]), [dict(replay='auto'), dict(replay=False)])
    learn = learner(opt_func=opt_func)[0]
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert learn.opt.n == 2*10

class Notes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stats):
        stats['n'] = stats.get('n', 0)+1
        return x*1
    @staticmethod
    def backward(ctx, g): return g,None
class CallsHeld(nn.Module):
    def __init__(self, f): super().__init__(); self.l,self.f = nn.Linear(6, 1),f
    def forward(self, x): return self.f(self.l(x))

def test_a_key_that_comes_with_the_first_step_into_a_dict_of_an_enclosing_function():
    def make():
        stats = {}
        return learner(model=lambda: CallsHeld(lambda x: Notes.apply(x, stats)), see=lambda l: [stats['n']])
    agrees(make, [dict(replay='auto'), dict(steps_per_execution=3)])

@dataclass
class Scaled:
    "Which has no hash, as dataclasses have none"
    by: float = .5
    def __call__(self, p, y): return F.mse_loss(p, y)*self.by

def test_a_loss_without_a_hash(): agrees(lambda: learner(loss_func=Scaled()), [dict(replay='auto'), dict(steps_per_execution=3)])
