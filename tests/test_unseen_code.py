"Code of the user's where a log of torch calls does not see it: around library code, in the backward pass, behind references"
import contextvars, functools, os, random, threading, warnings, weakref
import pytest, torch
import torch.nn.functional as F
from fastai.vision.all import *
from fastai.optimizer import sgd_step
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from fastai_xla.all import *

pytestmark = pytest.mark.filterwarnings('ignore')

class S: w = 1.
class Schedule(Callback):
    def before_fit(self): S.w = 1.
    def after_batch(self):
        if self.training: S.w += .1

class Own(nn.Module):
    def forward(self, x): return x*1.5

def dls():
    g = torch.Generator().manual_seed(0)
    items = list(zip(torch.randn(80, 6, generator=g), torch.randint(0, 3, (80,), generator=g)))
    return DataLoaders.from_dsets(items[:64], items[64:], bs=16, shuffle=False, num_workers=0, device='cpu')

def learner(mid=None, own=True, opt=partial(SGD, mom=.9), loss=None, cbs=Schedule):
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), mid or nn.Tanh()), *[Own()]*own, nn.Linear(8, 3))
    return Learner(dls(), model, loss_func=loss or nn.CrossEntropyLoss(), opt_func=opt, cbs=cbs and cbs(), lr=.05)

class Hooked(nn.Module):
    def forward(self, x):
        y,w = x*2,S.w
        if y.grad_fn is not None: y.grad_fn.register_hook(lambda gi, go: (gi[0]*w, *gi[1:]))
        return y
class Memo(nn.Module):
    ref = None
    def norm(self, x):
        if self.ref is None or self.ref() is not x: self.ref,self.v = weakref.ref(x),x.detach().pow(2).mean().sqrt()+1
        return self.v
    def forward(self, x): return x/self.norm(x)*self.norm(x).sqrt()
class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = WeakTensorKeyDictionary()
    def forward(self, x): return x*self.seen.setdefault(x, S.w)

CFG = {'w': 1.}
class Sets(Callback):
    def before_fit(self): self.put(1.)
    def after_batch(self):
        if self.training: self.put(1 + .1*self.train_iter)
    def put(self, w): CFG['w'],os.environ['XLA_TEST_W'] = w,str(w)
class ByDefault(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cfg=CFG): return x*cfg['w']
    @staticmethod
    def backward(ctx, g): return g
class ByEnvironment(ByDefault):
    @staticmethod
    def forward(ctx, x): return x*float(os.environ['XLA_TEST_W'])
class ByImport(ByDefault):
    @staticmethod
    def forward(ctx, x):
        from os import environ
        return x*float(environ['XLA_TEST_W'])
class Applies(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = [f]
    def forward(self, x): return self.f[0].apply(x)

def wrapped_forward():
    learn = learner()
    layer = learn.model[0][0]
    forward = layer.forward
    @functools.wraps(forward)
    def louder(x): return forward(x)*S.w
    layer.forward = louder
    return learn
def wrapped_stepper():
    @functools.wraps(sgd_step)
    def step(p, lr, **kwargs): p.data.add_(p.grad.data, alpha=-lr*S.w)
    return learner(opt=lambda ps, **kwargs: Optimizer(ps, [step], **kwargs))

def torch_optimizer(change):
    learn = learner(opt=partial(OptimWrapper, opt=torch.optim.SGD))
    learn.create_opt()
    change(learn.opt.opt)
    return learn
def scale(opt, args, kwargs):
    for g in opt.param_groups: g['lr'] = .05/S.w
def scale_weights(opt, args, kwargs):
    with torch.no_grad():
        for g in opt.param_groups:
            for p in g['params']: p.mul_(1 - .01*S.w)
def own_step(opt):
    step = opt.step
    def louder(closure=None):
        scale(opt, (), {})
        return step(closure)
    opt.step = louder
class TurnsPartial(Callback):
    def after_batch(self): self.model[0][1].func.keywords['negative_slope'] = .1*(1+self.train_iter)
def by_partial(): return learner(Lambda(partial(F.leaky_relu, negative_slope=.1)), cbs=TurnsPartial)

made = dict(
    hook_of_a_graph=lambda: learner(Hooked(), own=False), memo_by_weak_reference=lambda: learner(Memo()),
    weak_dict=lambda: learner(Remembers()), wraps_of_forward=wrapped_forward, wraps_of_a_stepper=wrapped_stepper,
    pre_hook_of_an_optimizer=lambda: torch_optimizer(lambda o: o.register_step_pre_hook(scale)),
    post_hook_of_an_optimizer=lambda: torch_optimizer(lambda o: o.register_step_post_hook(scale_weights)),
    step_of_an_inner_optimizer=lambda: torch_optimizer(own_step), partial_that_changes=by_partial,
    function_with_a_default=lambda: learner(Applies(ByDefault), cbs=Sets),
    function_of_the_environment=lambda: learner(Applies(ByEnvironment), cbs=Sets),
    function_that_imports=lambda: learner(Applies(ByImport), cbs=Sets))

def fit(learn): learn.fit(3, .05)

def fitted(make, fit, on_xla):
    "Losses and weights"
    for seed in (torch.manual_seed, np.random.seed, random.seed): seed(0)
    learn = make()
    if on_xla is not None: learn.to_xla(**on_xla)
    with learn.no_logging(), learn.no_bar(): fit(learn)
    ws = torch.cat([p.detach().cpu().flatten() for p in learn.model.parameters()])
    return torch.tensor([*map(float, learn.recorder.losses)]),ws

def check(make, fit=fit, retraced=False, **kwargs):
    "Replayed as on the CPU, and as `retraced` where torch runs the code, and may run it otherwise on XLA"
    cpu,replayed = (fitted(make, fit, to) for to in (None, kwargs))
    plain = fitted(make, fit, dict(replay=False)) if retraced else replayed
    for a,b,c in zip(cpu, plain, replayed):
        assert torch.allclose(b, c, atol=1e-6, rtol=1e-6), (b-c).abs().max()
        assert torch.allclose(a, c, atol=1e-4, rtol=1e-4), (a-c).abs().max()

@pytest.mark.parametrize('name', made)
def test_what_is_unseen_is_run(name): check(made[name], retraced=name.endswith(('optimizer', 'graph')))

class Louder(TorchFunctionMode):
    def __torch_function__(self, f, types, args=(), kwargs=None):
        r = f(*args, **(kwargs or {}))
        return r*S.w if f in (torch.tanh, torch.Tensor.tanh) else r

@pytest.mark.parametrize('own', [False, True])
def test_a_function_mode_around_a_fit(own):
    def within(learn):
        with Louder(): learn.fit(3, .05)
    check(lambda: learner(own=own), within, retraced=True)

def test_a_function_of_torch_that_the_user_has_replaced(monkeypatch):
    relu = F.relu
    monkeypatch.setattr(F, 'relu', lambda x, inplace=False: relu(x)*S.w)
    check(lambda: learner(nn.ReLU()))

here,there = threading.local(),contextvars.ContextVar('there', default=1.)
class OfThread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x*1.
    @staticmethod
    def backward(ctx, g): return g*here.w*there.get()

def test_backward_runs_in_the_thread_of_the_fit():
    "Where a `threading.local` and a `ContextVar` are those of the user"
    here.w = .3
    there.set(.5)
    check(lambda: learner(Applies(OfThread)), retraced=True)

class Scales:
    scale = 1.
    def __call__(self, g): return g*self.scale
class Asks:
    def __call__(self, g): return g*2 if hasattr(self, 'scale') else g
class Other(Scales):
    def __call__(self, g): return g*.5
class Inherits(Scales): pass
def in_class(o): Inherits.scale = 3.

def later(scales, change):
    def make():
        hook,learn = scales(),learner(own=False, cbs=None)
        class Changes(Callback):
            def after_batch(self):
                if self.training and self.train_iter == 5: change(hook)
        learn.add_cb(Changes())
        learn.model[-1].weight.register_hook(hook)
        return learn
    return make

@pytest.mark.parametrize('scales,change', [(Scales, lambda o: setattr(o, 'scale', 3.)), (Asks, lambda o: setattr(o, 'scale', 3.)),
                                           (Scales, lambda o: setattr(o, '__class__', Other)), (Inherits, in_class)],
                         ids=['shadows', 'hasattr', 'class', 'shadows_in_class'])
def test_an_attribute_that_comes_later(scales, change):
    def make():
        if 'scale' in vars(Inherits): del Inherits.scale
        return later(scales, change)()
    check(make)

class Focal:
    gamma = 1.
    def __call__(self, pred, targ): return (F.cross_entropy(pred, targ, reduction='none')**self.gamma).mean()
def scheduled(pred, targ): return F.cross_entropy(pred, targ)*S.w

def holding(what, change, loss=nn.CrossEntropyLoss):
    def make():
        learn = learner(own=False, loss=loss(), cbs=None)
        learn.create_opt()
        class Holds(Callback):
            def after_batch(self):
                if self.training: change(self.held, self.train_iter)
        cb = Holds()
        cb.held = what(learn)
        learn.add_cb(cb)
        return learn
    return make

def set_lr(hypers, n): hypers[0]['lr'] = .05/(1+n)
def smooth(loss, n): loss.label_smoothing = .04*n
def decay(ps, n):
    with torch.no_grad():
        for p in ps: p.mul_(.95)
def focus(loss, n): loss.gamma = 1 + .1*n
def leak(layer, n): layer.negative_slope = .1*n
def set_w(_, n): S.w = 1 + .1*n
held = dict(hypers=holding(lambda l: l.opt.hypers, set_lr), loss=holding(lambda l: l.loss_func, smooth),
            parameters=holding(lambda l: list(l.model.parameters()), decay), users_loss=holding(lambda l: l.loss_func, focus, Focal),
            a_global=holding(lambda l: set_w(l, 0), set_w, lambda: scheduled))

@pytest.mark.parametrize('name', held)
def test_several_steps_as_one_and_a_callback_that_holds_a_part_of_them(name): check(held[name], steps_per_execution=4)

def test_several_steps_as_one_beside_a_callback_that_holds_nothing():
    "They are one program still"
    class Notes(Callback):
        def before_fit(self): self.losses,self.seen = [],0
        def after_batch(self):
            self.losses.append(self.loss.detach())
            self.seen += len(self.xb[0])
    learn = learner(own=False, cbs=Notes).to_xla(steps_per_execution=4)
    with learn.no_logging(), learn.no_bar(), warnings.catch_warnings():
        warnings.filterwarnings('error', message='.*run one by one')
        learn.fit(2)
