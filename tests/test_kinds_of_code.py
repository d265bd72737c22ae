"Code as the public writes it, of kinds that other files do not have: replayed as retraced, and as on the CPU"
import gc, weakref
from by_log import *

def half(n, k):
    m = torch.zeros(n, dtype=torch.bool)
    m[torch.randperm(n)[:k]] = True
    return m

stories = {}
def story(f):
    stories[f.__name__] = f
    return f

class Net(nn.Module):
    def __init__(self, f, **mods):
        super().__init__()
        self.a,self.b,self.f = nn.Linear(6, 16),nn.Linear(16, 1),f
        for n,m in mods.items(): setattr(self, n, m)
    def forward(self, x): return self.f(self, self.a(x))
def net(f): return dict(model=lambda: Net(f))
def hooked(**events): return dict(cbs=lambda: type('Cb', (Callback,), events)())

@story
def temperature_and_features_of_a_teacher():
    def keep(cb, n): return lambda m,i,o: cb.f.update({n: o})
    def before_fit(cb):
        cb.t,cb.f = deepcopy(cb.model).eval(),{}
        cb.hs = [m[0].register_forward_hook(keep(cb, n)) for n,m in (('s', cb.model), ('t', cb.t))]
    def after_loss(cb):
        if not cb.training: return
        with torch.no_grad(): q = cb.t(cb.x)
        temp = 2 + .1*cb.train_iter
        cb.learn.loss_grad = cb.learn.loss_grad + F.mse_loss(cb.pred/temp, q/temp)*temp**2 + .1*F.mse_loss(cb.f['s'], cb.f['t'])
    return hooked(before_fit=before_fit, after_loss=after_loss, after_fit=lambda cb: [h.remove() for h in cb.hs])

@story
def average_of_gradients_by_name():
    def after_backward(cb):
        for n,p in cb.model.named_parameters():
            old = cb.g.get(n)
            cb.g[n] = p.grad.detach().clone() if old is None else old*.9 + p.grad*.1
            p.grad = p.grad + 2.*cb.g[n]
    return hooked(before_fit=lambda cb: setattr(cb, 'g', {}), after_backward=after_backward)

@story
def a_row_begins_again_with_its_state():
    def after_step(cb):
        if cb.train_iter % 6: return
        w = cb.model[0].weight
        with torch.no_grad(): w[0] = .01
        for k in ('grad_avg', 'sqr_avg'): cb.opt.state[w][k][0] = 0.
    return hooked(after_step=after_step) | dict(opt_func=Adam)

@story
def targets_put_back_for_the_metrics():
    def before_batch(cb): cb.kept,cb.learn.yb = cb.yb,()
    def after_pred(cb):
        cb.learn.loss_grad = sum(dict(a=F.mse_loss(cb.pred, cb.kept[0]), b=.1*cb.pred.pow(2).mean()).values())
        cb.learn.loss,cb.learn.yb = cb.loss_grad.clone(),cb.kept
    def loss(p, y): return F.mse_loss(p, y) + .1*p.pow(2).mean()
    return hooked(before_batch=before_batch, after_pred=after_pred) | dict(loss_func=lambda: loss, metrics=mse)

@story
def batch_of_another_dataloader():
    def before_batch(cb):
        if cb.training: cb.u = cb.dls.valid.one_batch()[0]
    def after_loss(cb):
        if cb.training: cb.learn.loss_grad = cb.learn.loss_grad + .1*cb.model(cb.u).pow(2).mean()
    return hooked(before_batch=before_batch, after_loss=after_loss)

@story
def averages_of_torch_from_a_step_on():
    def after_step(cb):
        if cb.train_iter > 8: cb.avg.update_parameters(cb.model)
    def before_fit(cb): cb.avg = cb.learn.avg = torch.optim.swa_utils.AveragedModel(cb.model)
    return hooked(before_fit=before_fit, after_step=after_step) | dict(see=lambda l: list(l.avg.state_dict().values()))

# --- flags, state and copies within a step

@story
def mask_of_the_host_as_an_index():
    def before_batch(cb):
        x = cb.x.clone()
        x[half(16, 5)] = 0.
        cb.learn.xb = (x,)
    return hooked(before_batch=before_batch)

@story
def flag_that_a_call_has_set():
    def f(s, x):
        out = torch.zeros(len(x), 1, device=x.device)
        for i in range(4): out[:,0] += x[:,i]
        return out*(2 if out.requires_grad else 1)
    return net(f)

@story
def frozen_within_the_step():
    def before_batch(cb): cb.model[0].bias.requires_grad_(cb.train_iter % 3 != 0)
    def after_backward(cb):
        n = sum(p.requires_grad for p in cb.model.parameters())
        for p in cb.model.parameters():
            if p.grad is not None: p.grad.mul_(n/4)
    return hooked(before_batch=before_batch, after_backward=after_backward)

@story
def backward_of_four_losses_at_once():
    def after_loss(cb):
        if cb.training: cb.sum,cb.n = cb.learn.loss_grad + cb.sum,cb.n+1
    def before_backward(cb):
        if cb.n % 4: raise CancelBackwardException
        cb.learn.loss_grad,cb.sum = cb.sum/4,0.
    def before_step(cb):
        if cb.n % 4: raise CancelStepException
    return hooked(before_fit=lambda cb: (setattr(cb, 'sum', 0.), setattr(cb, 'n', 0)), after_loss=after_loss,
                  before_backward=before_backward, before_step=before_step)

@story
def branch_on_the_optimizers_count():
    def after_step(cb):
        if cb.opt.state[cb.model[0].weight]['step'] % 5: return
        with torch.no_grad():
            for p in cb.model.parameters(): p.mul_(.9)
    return hooked(after_step=after_step) | dict(opt_func=Adam)

@story
def number_that_is_infinite_first():
    def after_backward(cb):
        c = math.inf if cb.train_iter < 7 else .01
        for p in cb.model.parameters(): p.grad.clamp_(-c, c)
    return hooked(after_backward=after_backward)

@story
def large_bank_on_the_host():
    def after_loss(cb):
        if not cb.training: return
        cb.learn.loss_grad = cb.learn.loss_grad + cb.bank.to(cb.x.device)[:4].mean()*cb.pred.mean()
        cb.bank[:4] += .1
    return hooked(before_fit=lambda cb: setattr(cb, 'bank', torch.zeros(1<<18, 4)), after_loss=after_loss)

@story
def copy_of_the_model_within_the_step():
    def after_step(cb):
        if cb.train_iter % 7 == 5: cb.learn.kept = deepcopy(cb.model)
    return hooked(after_step=after_step) | dict(see=lambda l: list(l.kept.state_dict().values()))

@story
def recorder_that_does_not_hear_of_a_batch():
    def after_loss(cb):
        if cb.training: cb.learn.recorder.run_train = cb.iter % 2 == 0
    return hooked(after_loss=after_loss, after_train=lambda cb: setattr(cb.recorder, 'run_train', True))

@story
def gradient_of_a_result():
    def f(s, x):
        s.feat = x.relu()
        if s.feat.requires_grad: s.feat.retain_grad()
        return s.b(s.feat)
    def after_backward(cb):
        for p in cb.model.parameters(): p.grad.mul_(1 + cb.model.feat.grad.norm())
    return net(f) | hooked(after_backward=after_backward)

@torch.jit.script
def scripted_mish(x): return x*torch.tanh(F.softplus(x))

@story
def scripted_function_from_a_step_on():
    def f(s, x):
        s.n = getattr(s, 'n', 0) + s.training
        return s.b(scripted_mish(x) if s.n > 12 else x.relu())
    return net(f)

@story
def scripted_module_from_a_step_on():
    def f(s, x):
        s.n = getattr(s, 'n', 0) + s.training
        return s.b(s.later(x) if s.n > 12 else x.relu())
    return dict(model=lambda: Net(f, later=torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))))

@story
def state_of_the_optimizer_replaced_after_its_step():
    def after_step(cb):
        for p in cb.model.parameters(): cb.opt.state[p]['grad_avg'] = cb.opt.state[p]['grad_avg']*.5
    return hooked(after_step=after_step) | dict(opt_func=Adam)

@story
def state_of_the_optimizer_cleared():
    def after_step(cb):
        if cb.train_iter % 8 == 7: cb.opt.state.clear()
    return hooked(after_step=after_step) | dict(opt_func=Adam)

def takes_away(when):
    def after_backward(cb):
        if when(cb.train_iter):
            for p in cb.model[2].parameters(): p.grad = None
    return hooked(after_backward=after_backward) | dict(opt_func=partial(SGD, mom=.9, wd=.1, decouple_wd=True))

@story
def gradients_taken_away(): return takes_away(lambda i: i > 1)

@story
def gradients_taken_away_at_times(): return takes_away(lambda i: i%3 == 2)

@story
def parameters_held():
    def after_backward(cb): cb.learn.kept.append(nn.Parameter(cb.model[0].weight.data.clone()))
    return hooked(before_fit=lambda cb: setattr(cb.learn, 'kept', []), after_backward=after_backward) | dict(see=lambda l: l.kept)

@story
def permutation_of_numpy():
    def before_batch(cb):
        i = np.random.permutation(16)
        cb.learn.xb,cb.learn.yb = (cb.x*.7 + cb.x[i]*.3,),(cb.y*.7 + cb.y[i]*.3,)
    return hooked(before_batch=before_batch)

@story
def numbers_on_the_batchs_device():
    def before_batch(cb):
        lam = cb.x.new_tensor(np.random.beta(.4, .4, 16))[:,None]
        cb.learn.xb = (cb.x*lam + cb.x.flip(0)*(1-lam),)
    return hooked(before_batch=before_batch)

@story
def numbers_of_lists_on_the_batchs_device():
    def after_pred(cb):
        scale = cb.pred.new_tensor([[1+.01*cb.train_iter], (cb.iter%3,)]).mean()
        cb.learn.pred = cb.pred*scale*cb.pred.new_tensor(data=[2.])
    return hooked(after_pred=after_pred)

@story
def copies_that_share():
    def after_pred(cb):
        p = copy(cb.pred)
        with torch.no_grad(): p.mul_(1+.01*cb.train_iter)
    return hooked(after_pred=after_pred)

@story
def whole_number_of_numpy():
    def after_loss(cb): cb.learn.loss_grad = cb.learn.loss_grad*np.int64(1+cb.train_iter)
    return hooked(after_loss=after_loss)

class Turned(torch.autograd.Function):
    by = 1.
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, g): return -g*Turned.by

@story
def gradient_turned_by_an_attribute_of_a_class():
    return net(lambda s,x: s.b(Turned.apply(x))) | hooked(before_batch=lambda cb: setattr(Turned, 'by', .1*cb.train_iter))

# --- beside the numbers

# steps of the first two are not replayed, and the others have many paths
traced = set('''backward_of_four_losses_at_once gradient_turned_by_an_attribute_of_a_class
    scripted_module_from_a_step_on frozen_within_the_step'''.split())

@pytest.mark.parametrize('name', stories)
def test_as_retraced_and_as_on_the_cpu(name):
    learn = agree(stories[name], branches=None, tol=1e-6, n=2)
    if name not in traced: assert counts(learn)[True]['replayed'] >= 10

def user_learner(**kwargs):
    kwargs = dict(model=lambda: Net(lambda s,x: s.b(x.relu())), cbs=list) | kwargs
    learn = Learner(data(), kwargs['model'](), loss_func=nn.MSELoss(), cbs=kwargs['cbs']()).to_xla()
    return learn

def fit(learn, n=1):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, 1e-2)

def test_an_optimizer_of_an_earlier_fit_is_let_go():
    learn = user_learner()
    fit(learn)
    old = weakref.ref(learn.opt)
    learn.create_opt()
    fit(learn)
    gc.collect()
    assert old() is None

def test_a_model_of_known_layers_is_traced_once_for_all_fits():
    learn = user_learner(model=lambda: Net(lambda s,x: s.b(s.more(x)), more=nn.Sequential(nn.Linear(16, 16), nn.ReLU())))
    for n in range(3):
        fit(learn)
        assert counts(learn)[True]['traced'] == counts(learn)[True]['compiled'] == (n == 0)

def test_a_loss_whose_graph_is_gone_is_told():
    "From a step on a loss of an earlier step is used: that one was replayed, and a gradient is lost with a warning"
    def before_fit(cb): cb.w = nn.Parameter(torch.ones(6, device=cb.dls.device))
    def after_loss(cb):
        if cb.training and cb.train_iter > 10: cb.learn.loss_grad = cb.learn.loss_grad + cb.last
        cb.last = (cb.x*cb.w).mean()
    learn = user_learner(**hooked(before_fit=before_fit, after_loss=after_loss))
    with pytest.warns(UserWarning, match='no gradient flows back'): fit(learn, 2)
    assert any('graph from before the step' in k for k in learn.xla_opt.replay.reasons.why)
