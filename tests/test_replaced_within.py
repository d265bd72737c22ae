"Methods, functions, buffers and classes that users replace within an epoch: replayed as retraced, and as fastai on the CPU"
import torch.nn.functional as F
from torch.nn.functional import conv1d
from by_log import *
from replacing import *

# --- methods that a callback replaces within an epoch, in learners that are recorded and in those that are logged

def halved(learn): learn.loss_grad.mul(.5).backward()

class Slow(Learner):
    def _step(self):
        for p in self.model.parameters(): p.grad.mul_(.1)
        super()._step()

def no_training(learn): learn.one_batch = lambda i, b: None if learn.training else Learner.one_batch(learn, i, b)

def not_stepped(learn):
    was = learn.opt.step
    learn.opt.step = lambda: was() if learn.train_iter % 2 else None

def fewer(learn): learn.opt.param_lists[0] = learn.opt.param_lists[0][:-1]

def hook(learn):
    def less(opt, args, kwargs):
        for g in opt.param_groups:
            for p in g['params']: p.grad.mul_(-.5)
    learn.opt.opt.register_step_pre_hook(less)

sgd = partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9)

@pytest.mark.parametrize('change,opt', [
    (no_training, Adam),
    (lambda l: setattr(l, '_step', lambda: None), Adam),
    (lambda l: setattr(l, '_backward', partial(halved, l)), Adam),
    (lambda l: setattr(l, '__class__', Slow), Adam),
    (not_stepped, Adam), (lambda l: setattr(l.opt, 'zero_grad', noop), Adam), (fewer, Adam), (hook, sgd)])
def test_a_method_is_replaced_within_an_epoch(change, opt):
    "From the next batch on the step is another, until it is as it was"
    def after_batch(cb):
        if cb.training and cb.train_iter == 5: change(cb.learn)
        if cb.training and cb.train_iter == 17:
            for o,k in ((cb.learn, 'one_batch'), (cb.learn, '_step'), (cb.learn.opt, 'zero_grad')): vars(o).pop(k, None)
    same(lambda: dict(cbs=lambda: [type('Change', (Callback,), dict(after_batch=after_batch))()], opt_func=opt), ticks=(False, True))

# --- functions of libraries, and tables of modules, that a callback replaces within an epoch

def half_step(self):
    for p in self.model.parameters(): p.grad.mul_(.1)
    self.opt.step()

def conv_forward(self, x, w, b): return conv1d(x, w*.5, b, padding=1)
def act(f): return nn.Sequential(nn.Linear(6, 16), nn.Sequential(f(), nn.Tanh()), nn.Linear(16, 1))
def modules(m, **named): m._modules = type(m._modules)(named)

@pytest.mark.parametrize('change,model', [
    (lambda patch, m: patch.setattr(Learner, '_step', half_step), lambda: act(nn.ReLU)),
    (lambda patch, m: patch.setattr(F, 'relu', F.silu), lambda: act(nn.ReLU)),
    (lambda patch, m: patch.setattr(nn.Conv1d, '_conv_forward', conv_forward), conv),
    (lambda patch, m: patch.setattr(nn.ReLU6, 'forward', lambda self, x: x.sigmoid()), lambda: act(nn.ReLU6)),   # that of `nn.Hardtanh`
    (lambda patch, m: modules(m, a=m[0], b=nn.Sigmoid(), c=m[2]), lambda: act(nn.ReLU)),
    (lambda patch, m: modules(m[1], a=nn.Sigmoid()), lambda: act(nn.ReLU)),
    (lambda patch, m: setattr(m[0], '_parameters', dict(weight=m[0].weight, bias=None)), lambda: act(nn.ReLU))])
def test_a_function_of_a_library_is_replaced_within_an_epoch(change, model):
    patches = []
    def after_batch(cb):
        if not cb.training or cb.train_iter != 7: return
        patches.append(pytest.MonkeyPatch())
        change(patches[-1], cb.model)
    def after_fit(cb):
        while patches: patches.pop().undo()
    events = dict(after_batch=after_batch, after_fit=after_fit)
    same(lambda: dict(model=model, cbs=lambda: [type('Change', (Callback,), events)()]), ticks=(False, True))

@pytest.mark.parametrize('cbs', [[], [Tick]])
def test_a_function_of_a_library_is_replaced_between_two_fits(cbs, monkeypatch):
    "By another of a library's: by its class the layer is what it was"
    res = []
    for xla in (False, True):
        seed()
        learn = Learner(data(), act(nn.ReLU), loss_func=nn.MSELoss(), cbs=[cb() for cb in cbs])
        if xla: learn.to_xla()
        with monkeypatch.context() as m, learn.no_bar(), learn.no_logging():
            learn.fit(1, 1e-2)
            m.setattr(F, 'relu', F.silu)
            learn.fit(1, 1e-2)
        res.append(list(map(float, learn.recorder.losses)))
        assert not xla or 'audit found' not in str(learn.xla_report())
    test_close(*res, eps=1e-4)

# --- buffers and classes of modules

def tanh(): return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

@pytest.mark.parametrize('to_buffer', [False, True])
def test_a_buffer_on_the_cpu_is_registered_within_an_epoch(to_buffer):
    "Or put in the place of one on the device"
    def model():
        m = tanh()
        if to_buffer: m.register_buffer('q', torch.ones(1))
        return m
    def after_batch(cb):
        if cb.training and cb.train_iter == 5: cb.model.register_buffer('q', torch.full((1,), 3.))
    def register(): return type('Register', (Callback,), dict(after_batch=after_batch))()
    learn = same(lambda: dict(model=model, cbs=lambda: [register()]), ticks=(False, True))
    assert learn.model.q.item() == 3

def test_a_module_gets_another_class_within_an_epoch():
    def after_batch(cb):
        if cb.training and cb.train_iter in (7, 15): cb.model[1].__class__ = {7: nn.Sigmoid, 15: nn.Tanh}[cb.train_iter]
    same(lambda: dict(model=tanh, cbs=lambda: [type('Class', (Callback,), dict(after_batch=after_batch))()]), ticks=(False, True))
