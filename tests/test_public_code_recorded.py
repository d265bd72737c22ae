"What published code was found to stumble on where steps are recorded and guarded: as on the CPU, and told no wrong reason"
import functools, pathlib, sys, types
from by_log import *
from test_kinds_of_code import hooked, net

stories,retraced = {},{}   # name -> story, and -> how many batches are retraced, with a part of the reason
def story(*told):
    def _inner(f):
        stories[f.__name__] = f
        if told: retraced[f.__name__] = told
        return f
    return _inner

class Running(nn.Module):
    "Statistics in a plain attribute, which is set to an alias of itself in validation, as in d2l's BatchNorm from scratch"
    def __init__(self):
        super().__init__()
        self.a,self.mean = nn.Linear(6, 1),torch.zeros(6)
    def forward(self, x):
        if self.mean.device != x.device: self.mean = self.mean.to(x.device)
        mean = .9*self.mean + .1*x.mean(0) if self.training else self.mean
        self.mean = mean.detach()
        return self.a(x) + mean.mean()

@story()
def statistics_are_set_to_an_alias(): return dict(model=Running, see=lambda learn: learn.model.mean)

class Forward(nn.Module):
    "A layer with an optimizer of its own, as in Hinton's forward-forward"
    def __init__(self, opt_func, warm):
        super().__init__()
        self.a,self.b = nn.Linear(6, 8),nn.Linear(8, 1)
        self.opt = opt_func(self.a.parameters(), lr=.03)
        if warm: self(torch.linspace(-1, 1, 24).view(4, 6))
    def forward(self, x):
        if self.training:
            self.opt.zero_grad()
            self.a(x).pow(2).mean().backward()
            self.opt.step()
        return self.b(self.a(x.detach()).detach())

@story(1, 'comes or goes within the step')
def an_optimizer_in_a_layer(): return dict(model=lambda: Forward(torch.optim.Adam, False))

class Hides(Callback):
    "As adapters of detection models do"
    def before_batch(self):
        self.learn.xb = self.xb[0],self.yb[0]
        self.learn.yb = ()
    def after_pred(self):
        self.learn.loss_grad,self.learn.pred = self.pred
        self.learn.loss = self.loss_grad.clone()
    def after_loss(self): self.learn.yb = [self.xb[1]]

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = mlp()
    def forward(self, x, y):
        p = self.m(x)
        return F.mse_loss(p, y),p

@story()
def targets_hidden_in_the_step(): return dict(model=WithLoss, loss_func=lambda: noop, metrics=mae, cbs=Hides)

@story()
def a_batch_changed_through_a_view_at_some_steps():
    def before_batch(cb):
        if cb.iter%3 == 1: cb.xb[0][:] = torch.clamp_max(cb.xb[0][:], 1.)
    return hooked(before_batch=before_batch)

@story()
def names_imported_within():
    def loss(p, t):
        import math
        from torch.nn import functional as FF
        from torch.distributions import Normal
        return FF.mse_loss(p, t)*math.sqrt(2) - .1*Normal(p, 1., validate_args=False).log_prob(t).mean()
    return dict(loss_func=lambda: loss)

def scaled(f):
    @functools.wraps(f)
    def wrapper(self, *args, **kwargs):
        args = list(args)
        args[0] = args[0]*1.
        if 'scale' in f.__code__.co_varnames: kwargs['scale'] = 2.
        return f(self, *args, **kwargs)
    return wrapper

class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = mlp()
    @scaled
    def forward(self, x, scale=1.): return self.m(x)*scale

@story()
def arguments_filled_in_by_a_decorator(): return dict(model=Decorated)

class Typed(Decorated):
    def forward(self, x):
        self.last = x.shape[0]
        return x if type(x) is list else self.m(x)

@story(1, 'last comes or goes within the step')
def an_attribute_beside_a_type(): return dict(model=Typed)

def same_values(learn, refs):
    "The losses of validation and the metrics are the CPU's"
    want = refs[1]['values']
    test_close(learn.recorder.values, want, 1e-4*max(1, *map(max, want)))

def by_log_and_guards(story, request):
    "Why steps are retraced beside a log; the learner whose steps are guarded; what the story leaves retraced and on the CPU"
    refs = references(story)
    told = dict(same(story, tol=1e-6, refs=refs).xla_report().plain)
    request.getfixturevalue('recorded')
    return told,same(story, tol=1e-6, refs=refs),refs

@pytest.mark.parametrize('name', stories)
def test_as_retraced_and_as_on_the_cpu(name, request):
    by_log,learn,refs = by_log_and_guards(stories[name], request)
    same_values(learn, refs)
    told,(n,why) = dict(learn.xla_report().plain),retraced.get(name, (0, ''))
    assert sum(told.values()) == n and all(why in k for k in told), told
    assert name != 'names_imported_within' or not by_log, by_log   # a distribution that checks nothing

def test_where_a_value_is_read(recorded):
    def loss(p, t):
        scale = 2 if p.mean() > 1e9 else 1
        return F.mse_loss(p, t)*scale
    learn = run(lambda: dict(loss_func=lambda: loss), 'auto')[1]
    line = loss.__code__.co_firstlineno+1
    told = f'the value of a tensor is read within the step, in loss at {pathlib.Path(__file__).name}, line {line}'
    assert set(learn.xla_report().plain) == {told}

def test_momentum_on_the_host(request):
    "Of an optimizer that a layer has, and that has stepped before the model went to the device"
    def see(learn): return [s['momentum_buffer'] for s in learn.model.opt.state.values()]
    by_log_and_guards(lambda: dict(model=lambda: Forward(partial(torch.optim.SGD, momentum=.9), True), see=see), request)

def test_modules_that_are_none(recorded, monkeypatch):
    class Lazy(types.ModuleType):
        def __getattr__(self, n): return lambda *a, **k: None
    lazy,by_path = Lazy('odd_one'),types.ModuleType('odd_one')
    by_path.__file__ = pathlib.Path('/tmp/odd_one.py')
    refs = None
    for m in (lazy, by_path):
        monkeypatch.setitem(sys.modules, 'odd_one', m)
        refs = refs or references(dict)
        assert not same(dict, tol=1e-6, refs=refs).xla_report().plain, m

class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, x):
        ctx.save_for_backward(g, x)
        return g*3*x*x
    @staticmethod
    def backward(ctx, gg):
        g,x = ctx.saved_tensors
        return gg*3*x*x,gg*g*6*x

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3
    @staticmethod
    def backward(ctx, g): return Inner.apply(g, *ctx.saved_tensors)

def test_a_derivative_with_a_derivative():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = nn.Linear(6, 8),nn.Linear(8, 1)
        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = self.b(Cube.apply(self.a(x)))
                g, = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y + .01*g.sum(1, keepdim=True)
    assert not same(lambda: dict(model=Net), tol=1e-6).xla_report().plain

def test_dice_of_part_of_a_batch():
    "Given by a metric of the user's, which leaves pixels out"
    class Some(Metric):
        def __init__(self): self.dice = Dice()
        def reset(self): self.dice.reset()
        def accumulate(self, learn):
            p,t = torch.cat([-learn.pred, learn.pred], 1),(learn.y > 0).long()
            self.dice.accumulate(SimpleNamespace(pred=p[2:], y=t[2:]))
        @property
        def value(self): return self.dice.value
    def story(): return dict(metrics=Some())
    refs = references(story)
    same_values(same(story, tol=1e-6, refs=refs), refs)
