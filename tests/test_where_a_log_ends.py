"Code that no log can answer for: the step is retraced, says why, and has the numbers of the CPU"
import threading
from collections import OrderedDict
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.ops import FeaturePyramidNetwork
from torch.utils.flop_counter import FlopCounterMode
from fastai_xla.capture.patches import looked_at
from test_log import *
from test_kinds_of_code import Net, net, hooked

refused,followed = {},{}
def story(why):
    "A story whose steps are refused because of `why`"
    def _add(f):
        refused[f.__name__] = f,why
        return f
    return _add
def follows(f):
    followed[f.__name__] = f
    return f

# --- autograd functions of the user's

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.clone()

def function(backward): return type('Own', (Scale,), dict(backward=staticmethod(backward)))
def counting(fn, arg):
    "A model that counts its steps and applies `fn` with `arg` of the count"
    def model():
        m = Net(None)
        m.f = lambda m, y: m.b(fn.apply(y.relu(), arg(m, count(m))))
        return m
    def count(m):
        if m.training: m.n = getattr(m, 'n', 0) + 1
        return getattr(m, 'n', 0)
    return dict(model=model)

@follows
def a_function_that_branches_on_a_float():
    def backward(ctx, g): return (g*3 if ctx.by > .5 else g*ctx.by), None
    return counting(function(backward), lambda m, n: .1*(n%10))

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

# --- what is replayed all the same

@follows
def a_margin_that_grows():
    def loss(p, y, n=[0]):
        n[0] += 1
        return F.mse_loss(p, y) + F.margin_ranking_loss(p, p.roll(1, 0), y.sign(), margin=.01*n[0])
    return dict(loss_func=lambda: partial(loss, n=[0]))

@follows
def most_batches_are_passed_over():
    def before_batch(cb):
        if cb.training and cb.iter%8 > 1: raise CancelBatchException
    def after_pred(cb): cb.learn.pred = cb.pred*1.
    return hooked(before_batch=before_batch, after_pred=after_pred)

@follows
def a_penalty_at_times():
    def after_loss(cb):
        if not cb.training or cb.train_iter%4: return
        x = cb.x.detach().requires_grad_()
        g, = torch.autograd.grad(cb.model(x).sum(), x, create_graph=True)
        cb.learn.loss_grad = cb.loss_grad + g.pow(2).sum(1).mean()
    return hooked(after_loss=after_loss)

@follows
def what_is_asked_twice_is_the_same():
    "After another branch the results so far are real, and the user's code holds what it was given before"
    def after_backward(cb):
        p = cb.model[0].weight
        g = p.grad
        if cb.train_iter%4 == 3: g.mul_(2)
        if p.grad is not g: p.grad = g*100
    return hooked(after_backward=after_backward)

def sequence(weights, n=6):
    "Layers of a library whose weights a user's code has computed; after `n` steps they are given something else"
    def f(m, x):
        if m.training: m.n = getattr(m, 'n', 0) + 1
        return weights(m, x.flip(1) if getattr(m, 'n', 0) > n else x)
    return dict(model=lambda: Net(f, more=nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))))

@follows
def layers_whose_weight_is_set():
    def weights(m, x):
        if not hasattr(m, 'raw'):
            m.raw = nn.Parameter(m.more[0].weight.data.clone())
            del m.more[0]._parameters['weight']
        m.more[0].weight = m.raw*2
        return m.more(x)
    def model():
        m = sequence(weights)['model']()
        m(torch.zeros(1, 6))
        return m
    return dict(model=model)

@follows
def a_teacher_of_the_same_weights():
    def weights(m, x):
        with torch.no_grad(): teacher = torch.func.functional_call(m.more, {n: p*.9 for n,p in m.more.named_parameters()}, (x,))
        return m.b(x) + .3*teacher
    return sequence(weights)

@follows
def layers_of_a_hypernetwork():
    return sequence(lambda m, x: torch.func.functional_call(m.more, {n: p*(1+x.mean()) for n,p in m.more.named_parameters()}, (x,)))

@follows
def a_mean_of_what_the_last_step_has_left():
    "torch_xla remembers the dtype of what a traced step has made, and the graph of a mean is another one then"
    def after_pred(cb):
        if cb.training and hasattr(cb, 'last'): cb.learn.pred = cb.pred + .1*cb.last.mean()
        cb.last = cb.pred.detach()
    return hooked(after_pred=after_pred)

@follows
def a_part_of_a_sequence_of_layers():
    "A slice is a new module at each step"
    return dict(model=lambda: Net(lambda m, x: m.b(m.more[:2](x)), more=nn.Sequential(nn.ReLU(), nn.Linear(16, 16), nn.ReLU())))

@follows
def rows_of_a_list():
    def after_pred(cb):
        i = random.sample(range(16), 4)
        if cb.training: cb.learn.pred,cb.learn.yb = cb.pred[i],(cb.y[i],)
    return hooked(after_pred=after_pred)

@follows
def a_compiled_loss():
    loss = torch.compile(lambda p, y: (p-y).abs().mean() + F.mse_loss(p, y), backend='eager')
    def after_pred(cb): cb.learn.pred = cb.pred*(1+cb.train_iter/100)
    return hooked(after_pred=after_pred) | dict(loss_func=lambda: loss)

def test_a_mode_around_a_fit_sees_each_operator():
    for story in (lambda: hooked(after_pred=lambda cb: setattr(cb.learn, 'pred', cb.pred.tanh())), dict):
        ns = []
        for replay in (False, 'auto'):
            with Counting() as mode: _,learn = run(lambda: story() | dict(model=lambda: nn.Sequential(mlp(), nn.Tanh())), replay, n=1)
            ns.append(mode.n)
        assert ns[0] == ns[1] > 0 and learn.xla_opt.replay.fit.plain[looked_at] == 12

n_traced = dict(a_function_that_branches_on_a_float=10, a_margin_that_grows=1, most_batches_are_passed_over=1, a_penalty_at_times=3,
                what_is_asked_twice_is_the_same=2, layers_whose_weight_is_set=2, a_teacher_of_the_same_weights=2,
                layers_of_a_hypernetwork=2, a_mean_of_what_the_last_step_has_left=2,
                a_part_of_a_sequence_of_layers=1, rows_of_a_list=1, a_compiled_loss=1)

@pytest.mark.parametrize('name,traced', n_traced.items())
def test_replayed(name, traced):
    learn = agree(followed[name], branches=None, tol=1e-6)
    assert counts(learn)[True]['traced'] == traced and not counts(learn)[True]['refused']

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

def test_a_default_device_within_a_step_is_no_call_of_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.n = mlp(),0
        def forward(self, x):
            self.n += 1
            with torch.device(x.device): return self.body(x)*torch.full((1,), 1/(1+.05*self.n)) + torch.tensor([.01*self.n])
    agree(lambda: dict(model=Net), branches=None)
    learn = run(lambda: dict(model=Net), 'auto')[1]
    assert not learn.xla_report().plain and counts(learn)[True]['replayed'] > 20

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
