"Code that no log can answer for: the step is retraced, says why, and has the numbers of the CPU"
import threading
from collections import OrderedDict
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.ops import FeaturePyramidNetwork
from torch.utils.flop_counter import FlopCounterMode
from by_log import *
from test_kinds_of_code import hooked
from own_functions import counting, function

refused = {}
def story(why):
    "A story whose steps are refused because of `why`"
    def _add(f):
        refused[f.__name__] = f,why
        return f
    return _add

# --- autograd functions of the user's

@story('given a SimpleNamespace')
def a_function_that_is_given_settings():
    def arg(m, n):
        if not hasattr(m, 'cfg'): m.cfg = SimpleNamespace()
        m.cfg.by = n/30
        return m.cfg
    def backward(ctx, g): return g*ctx.by.by, None
    return counting(function(backward), arg)

rate = 1.
def rate_now(): return rate
@story('rate_now reads rate, a global')
def a_function_whose_helper_reads_a_global():
    def arg(m, n):
        global rate
        rate = n/30
        return 1.
    def backward(ctx, g): return g*rate_now(), None
    return counting(function(backward), arg)

@story('given a list')
def a_function_that_notes_its_gradients():
    seen = []
    def backward(ctx, g):
        ctx.by.append(g.abs().mean())
        return g, None
    def model():
        m = counting(function(backward), lambda m, n: seen)['model']()
        seen.clear()
        return m
    return dict(model=model, see=lambda l: [len(seen), *seen])

# --- the user's code within a library's, beside it and around it

@story("calls one of yours")
def a_distance_of_the_users():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.n,self.l = 0,nn.TripletMarginWithDistanceLoss(distance_function=self.dist, margin=.5)
        def dist(self, a, b): return (a-b).abs().pow(2).sum(-1)*(1+self.n/10)
        def forward(self, p, y):
            self.n += 1
            return self.l(p, y, p.roll(1, 0)) + F.mse_loss(p, y)
    return dict(loss_func=Loss)

@story('another thread')
def a_thread_that_reads_the_loss():
    def after_loss(cb):
        if not cb.training: return
        loss = cb.loss.detach()
        t = threading.Thread(target=lambda: cb.learn.seen.append(float(loss)))
        t.start()
        t.join()
    return hooked(before_fit=lambda cb: setattr(cb.learn, 'seen', []), after_loss=after_loss) | dict(see=lambda l: l.seen)

@story('looks at each operator')
def a_count_of_operations():
    def before_batch(cb):
        with FlopCounterMode(display=False) as c, torch.no_grad(): cb.model(cb.x)
        cb.learn.seen.append(c.get_total_flops())
    return hooked(before_fit=lambda cb: setattr(cb.learn, 'seen', []), before_batch=before_batch) | dict(see=lambda l: l.seen[:30])

@story('made where nobody saw it')
def a_view_of_a_weight_that_is_held():
    def before_batch(cb):
        if cb.training and cb.train_iter%6 == 3: cb.learn.view = cb.model[0].weight.data[0]
    def after_step(cb):
        if cb.learn.view is not None: cb.learn.seen.append(cb.learn.view.sum())
    def before_fit(cb): cb.learn.seen,cb.learn.view = [],None
    return hooked(before_fit=before_fit, before_batch=before_batch, after_step=after_step) | dict(see=lambda l: l.seen)

def another(to_xla, go):
    def after_step(cb):
        if cb.iter%4 != 3: return
        other = Learner(cb.dls, cb.model, loss_func=nn.MSELoss())
        if to_xla and hasattr(cb.learn, 'xla_opt'): other.to_xla()
        with other.no_bar(), other.no_logging(): cb.learn.seen.append(go(other))
        cb.model.train()
    return hooked(before_fit=lambda cb: setattr(cb.learn, 'seen', []), after_step=after_step) | dict(see=lambda l: l.seen)
@story('another learner')
def another_learner_predicts(): return another(False, lambda l: l.get_preds(dl=l.dls.valid)[0].mean())
@story('another learner')
def another_learner_on_xla_validates(): return another(True, lambda l: l.validate()[0])

class Maps(OrderedDict): pass

@story('holds tensors')
def a_dict_of_the_users_own_for_a_module_of_a_library():
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.f,self.b,self.maps = FeaturePyramidNetwork([6], 4),nn.Linear(4, 1),Maps()
        def forward(self, x):
            self.maps['a'] = x[:,:,None,None]
            return self.b(self.f(self.maps)['a'].mean((2, 3)))
    return dict(model=Pyramid)

class Counting(TorchDispatchMode):
    n = 0
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.n += 'tanh' in str(f)
        return f(*args, **(kwargs or {}))

@story('looks at each operator')
def a_mode_of_the_users():
    mode = Counting()
    def after_pred(cb):
        with mode: cb.learn.pred = cb.pred.tanh() + 1
    return hooked(after_pred=after_pred) | dict(see=lambda l: mode.n)

@story('run code of Louder')
def a_class_of_tensors_of_the_users():
    class Louder(torch.Tensor):
        gain = 1.
        @classmethod
        def __torch_function__(cls, f, types, args=(), kwargs=None):
            r = super().__torch_function__(f, types, args, kwargs or {})
            return r*cls.gain if f is torch.Tensor.tanh else r
    def after_pred(cb):
        Louder.gain = 1+cb.train_iter/50
        cb.learn.pred = cb.pred.as_subclass(Louder).tanh().as_subclass(torch.Tensor)
    return hooked(after_pred=after_pred)

@story('run code of Heard')
def a_class_of_tensors_that_counts():
    "Nobody but the user's code calls torch with it"
    class Heard(torch.Tensor):
        n = 0
        @classmethod
        def __torch_function__(cls, f, types, args=(), kwargs=None):
            cls.n += 1
            return super().__torch_function__(f, types, args, kwargs or {})
    def after_pred(cb): cb.learn.pred = cb.pred.as_subclass(Heard).tanh().as_subclass(torch.Tensor)*(1+Heard.n/50)
    return hooked(after_pred=after_pred) | dict(see=lambda l: Heard.n)

gain = 1.
@torch.library.custom_op('fastai_xla_tests::louder', mutates_args=())
def louder(x: torch.Tensor) -> torch.Tensor: return x*gain

@story('may run code of yours')
def an_operator_of_the_users():
    def before_batch(cb):
        global gain
        gain = 1+cb.train_iter/50
        cb.learn.xb = (louder(cb.x),)
    return hooked(before_batch=before_batch)

@pytest.mark.parametrize('name', refused)
def test_refused_and_named(name):
    f,why = refused[name]
    learn = agree(f, branches=None, tol=1e-6)
    assert counts(learn)[True]['refused'] and any(why in k for k in learn.xla_opt.replay.reasons.why), learn.xla_opt.replay.reasons.why

def test_a_mode_around_a_fit_sees_each_operator():
    for story in (lambda: hooked(after_pred=lambda cb: setattr(cb.learn, 'pred', cb.pred.tanh())), dict):
        ns = []
        for replay in (False, 'auto'):
            with Counting() as mode: _,learn = run(lambda: story() | dict(model=lambda: nn.Sequential(mlp(), nn.Tanh())), replay, n=1)
            ns.append(mode.n)
        assert ns[0] == ns[1] > 0 and sum(n for why,n in learn.xla_opt.replay.fit.plain.items() if 'has to see each call' in why) == 12

@pytest.mark.parametrize('own', [False, True])
def test_a_search_for_a_nan_is_told(own):
    "It reads each gradient, which nobody would guess who left it on"
    def fitted(nan):
        learn = Learner(data(), mlp(), loss_func=(lambda p,t: F.mse_loss(p, t)) if own else nn.MSELoss()).to_xla()
        with learn.no_bar(), learn.no_logging(), torch.autograd.detect_anomaly(check_nan=nan): learn.fit(1, 1e-2)
        return len(learn.dls.train),learn.xla_report().plain
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        (n,found),(_,none) = fitted(True),fitted(False)
    assert ['set_detect_anomaly' in why for why in found] == [True] and [*found.values()] == [n] and not none

def test_one_reason_for_a_number_that_changes():
    def after_pred(cb): cb.learn.pred = torch.nn.functional.dropout(cb.pred, .01*cb.train_iter, cb.training)
    _,learn = run(lambda: hooked(after_pred=after_pred), 'auto', n=1)
    assert len([k for k in learn.xla_opt.replay.reasons.why if 'dropout' in k]) == 1

class Halves(torch.overrides.TorchFunctionMode):
    "Each tanh is smaller than the last"
    def __init__(self): self.n = 0
    def __torch_function__(self, f, types, args=(), kwargs=None):
        res = f(*args, **(kwargs or {}))
        if f is not torch.tanh: return res
        self.n += 1
        return res*.98**self.n

@pytest.mark.parametrize('inner', [False, True])
def test_a_mode_of_the_users_sees_each_torch_function(inner):
    "Also those of a library's module, which is one call elsewhere"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.mode = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),Halves()
        def forward(self, x):
            with self.mode: return self.body(x) if inner else self.body[2](torch.tanh(self.body[0](x)))
    (cpu,_),(got,learn) = run(lambda: dict(model=Net), None, xla=False),run(lambda: dict(model=Net), 'auto')
    np.testing.assert_allclose(got['losses'], cpu['losses'], rtol=1e-5)
    assert any('looks at each torch function' in why for why in learn.xla_report().plain)

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): raise ValueError('no')

def test_a_debugger_may_look_at_the_frames_of_an_error():
    "IPython does for each traceback: with code that had other variables of enclosing functions the process died"
    class Net(nn.Linear):
        def forward(self, x): return Fails.apply(super().forward(x))
    with pytest.raises(ValueError) as e: run(lambda: dict(model=lambda: Net(6, 1)), 'auto')
    names = [tb.name for tb in e.traceback if isinstance(tb.frame.f_locals, dict)]
    assert 'forward' in names and names[-1] == 'forward'
