"Code of many kinds in models, callbacks and optimizers that runs at every step: replayed as retraced, bit for bit, and as on the CPU"
from by_log import *

stories = {}
def story(f):
    stories[f.__name__] = f
    return f

class Net(nn.Module):
    "A function of the user's between two layers; it may use layers of its own"
    def __init__(self, f, *mods, o=16):
        super().__init__()
        self.a,self.b,self.f,self.mods = nn.Linear(6, 16),nn.Linear(o, 1),f,nn.ModuleList(mods)
    def forward(self, x): return self.b(self.f(self, self.a(x)))

def net(f, *mods, **kwargs): return dict(model=lambda: Net(f, *[m() for m in mods], **kwargs))
def hooked(event, f): return dict(cbs=lambda: type('Cb', (Callback,), {event: f})())

# --- models

@story
def index_assignment():
    def f(s, x):
        x = x.clone()
        x[:,0] = 0.
        x[:,1:3] += 1
        return x
    return net(f)
def host_in_shape(make): return lambda: net(lambda s,x: x + make(x).to(x.device))
stories |= dict(expands_as=host_in_shape(lambda x: torch.Tensor([.5]).expand_as(x)),
    views_as=host_in_shape(lambda x: torch.arange(float(x.numel())).view_as(x)/99),
    ones_of_the_host=host_in_shape(lambda x: torch.ones_like(x, device='cpu')),
    draws_on_the_host=host_in_shape(lambda x: torch.rand_like(x, device='cpu')),
    new_of_the_host=host_in_shape(lambda x: x.new_full(x.shape, .5, device='cpu')))
@story
def rows_of_a_mask_of_the_host():
    def f(s, x):
        mask = torch.rand(len(x)).argsort() < 5   # as many each time
        pad = x.new_zeros(x.shape)
        pad[mask] = x[mask].relu()
        return pad + x
    return net(f)
@story
def attention_of_torch():
    return net(lambda s,x: s.mods[0](x[:,None], x[:,None], x[:,None])[0][:,0], lambda: nn.MultiheadAttention(16, 2, batch_first=True))
@story
def attention_by_hand(): return net(lambda s,x: F.scaled_dot_product_attention(x[:,None], x[:,None], x[:,None])[:,0])
@story
def lstm(): return net(lambda s,x: s.mods[0](x.view(-1, 4, 4))[0][:,-1], lambda: nn.LSTM(4, 8, batch_first=True), o=8)
@story
def weight_norm():
    return net(lambda s,x: s.mods[0](x).relu(), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)))
@story
def spectral_norm():
    return net(lambda s,x: s.mods[0](x).relu(), lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)))
@story
def older_spectral_norm(): return net(lambda s,x: s.mods[0](x).relu(), lambda: nn.utils.spectral_norm(nn.Linear(16, 16)))
@story
def batchnorm(): return net(lambda s,x: s.mods[0](x).relu(), lambda: nn.BatchNorm1d(16))
@story
def chunks(): return net(lambda s,x: torch.cat([c*i for i,c in enumerate(torch.einsum('bi,bi->bi', x, x).chunk(4, 1), 1)], 1))
@story
def in_place(): return net(lambda s,x: F.relu_(x.mul_(2)))
@story
def gradient_in_forward():
    def f(s, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            g, = torch.autograd.grad(z.pow(3).sum(), z)
        return x + .01*g
    return net(f)

class Counts(nn.Module):
    "A buffer that counts, and an average that begins as `None`"
    def __init__(self):
        super().__init__()
        self.l,self.avg = nn.Linear(6, 1),None
        self.register_buffer('n', torch.zeros(()))
    def forward(self, x):
        if self.training: self.n += 1
        r = self.l(x)
        self.avg = r.detach().mean() if self.avg is None else .9*self.avg + .1*r.detach().mean()
        return r*(1+self.n*.01)
@story
def counts_in_a_buffer(): return dict(model=Counts, see=lambda learn: [learn.model.n, learn.model.avg])

# --- callbacks

@story
def clamps_data(): return hooked('after_step', lambda cb: [p.data.clamp_(-.3, .3) for p in cb.model.parameters()])
@story
def assigns_data(): return hooked('after_step', lambda cb: [setattr(p, 'data', p.data*.99) for p in cb.model.parameters()])
@story
def halves_a_row(): return hooked('after_step', lambda cb: cb.model[0].weight.data[0].mul_(.5))
@story
def signs_of_gradients():
    return hooked('after_backward', lambda cb: [setattr(p, 'grad', p.grad.sign()*p.grad.abs().mean()) for p in cb.model.parameters()])
@story
def seeds_and_draws():
    def f(cb):
        torch.manual_seed(1)
        cb.learn.pred = cb.pred + torch.rand(1).item()
    return hooked('after_pred', f)
@story
def noise_of_numpy():
    def f(cb):
        noise = torch.tensor(np.random.randn(*cb.x.shape), dtype=torch.float32, device=cb.x.device)
        cb.learn.xb = (cb.x + noise*.1,)
    return hooked('before_batch', f)
@story
def another_backward():
    return hooked('after_backward', lambda cb: (cb.learn.loss_func(cb.model(cb.x*.5), *cb.yb)*.5).backward())
@story
def cancels_steps():
    def f(cb):
        if cb.train_iter % 3 == 0: raise CancelStepException
    return hooked('before_step', f)
@story
def accumulates(): return dict(cbs=lambda: [GradientAccumulation(32), Weight('iter')])
@story
def clips(): return dict(cbs=lambda: [GradientClip(.1), Weight('list')])

class Averages(Callback):
    "Validates with an average of the weights"
    def before_fit(self): self.avg = self.copy()
    def copy(self): return {k: v.detach().clone() for k,v in self.model.state_dict().items()}
    def after_step(self):
        with torch.no_grad():
            for k,v in self.model.state_dict().items(): self.avg[k].lerp_(v, .1)
    def before_validate(self):
        self.kept = self.copy()
        self.model.load_state_dict(self.avg)
    def after_validate(self): self.model.load_state_dict(self.kept)
@story
def validates_with_averages(): return dict(cbs=Averages)

class GradientBefore(Callback):
    "Compares a gradient with that of the batch before"
    def before_fit(self): self.prev = None
    def after_backward(self):
        g = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        if self.prev is not None:
            k = (g*self.prev).sum()/(self.prev.norm()*g.norm()+1e-8)
            for p in self.model.parameters(): p.grad.mul_(1+.1*k)
        self.prev = g.clone()
@story
def gradient_of_the_batch_before(): return dict(cbs=GradientBefore)

kept = []
class KeepsPredictions(Callback):
    def before_fit(self): kept.clear()
    def after_pred(self): kept.append((self.pred.detach(), self.pred[:2,0].detach()))
@story
def keeps_predictions(): return dict(cbs=KeepsPredictions, see=lambda learn: list(kept))

# --- metrics and optimizers

@story
def metric_of_the_user(): return dict(metrics=lambda p,t: (p-t).abs().mean())

class Own(torch.optim.Optimizer):
    "With a number that warms up, and state that is made at the first step"
    def __init__(self, params, lr=.01):
        super().__init__(params, dict(lr=lr))
        self.t = 0
    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        for g in self.param_groups:
            for p in g['params']:
                m = self.state[p].setdefault('m', torch.zeros_like(p))
                m.mul_(.9).add_(p.grad, alpha=.1)
                p.addcdiv_(m, m.abs().sqrt()+1e-3, value=-g['lr']*min(1, self.t/10))
@story
def optimizer_of_the_user(): return dict(opt_func=partial(OptimWrapper, opt=Own))

@pytest.mark.parametrize('name', stories)
def test_replayed_is_retraced_is_the_cpu(name):
    n = 3 if name in ('accumulates', 'validates_with_averages') else 2   # epochs
    # the program of a batch that is not stepped has other outputs, and on some machines XLA fuses it otherwise
    learn = agree(stories[name], branches=None, tol=1e-6 if name == 'accumulates' else 0., n=n)
    train,report = counts(learn)[True],learn.xla_report()
    assert train['replayed'] >= 10*n-4 and not report.plain and not report.beside
    assert (report.per_batch('training')['executions'], report.per_batch('training')['compiles']) == (1, 0)
