"Optimizers of packages and of the user's own, and networks that are trained beside a learner's: the same on XLA as on the CPU"
import pytest, torch
from torch import nn
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.aot.take import _state_of
from fastai_xla.transfer import fetch
from common import *
from on_both import agree, told

class Counts(torch.optim.SGD):
    "An optimizer that counts its steps in a tensor beside the states of its parameters"
    def step(self, closure=None):
        if 'k' not in self.state: self.state['k'] = torch.tensor([0])
        super().step(closure)
        self.state['k'] += 1

def test_optimizer_with_a_tensor_of_its_own_in_its_state():
    losses = []
    for on_xla in (False, True):
        set_seed(0)
        learn = image_learner(image_dls(n=4*8, n_valid=8, bs=8), opt_func=partial(OptimWrapper, opt=Counts))
        if on_xla: learn.to_xla()
        with learn.no_logging(), learn.no_bar(): learn.fit(2, 1e-2)
        losses.append(fetch(torch.stack(learn.recorder.losses)))
        test_eq(learn.opt.opt.state['k'].item(), 2*4)
    test_close(losses[1], losses[0], eps=1e-4)
    check_training(learn)
    test_eq(_state_of(learn), {})   # what programs take is the parameters' state
    learn.detach_xla()
    with learn.no_logging(), learn.no_bar(): learn.fit(1, 1e-2)
    test_eq(learn.opt.opt.state['k'].item(), 3*4)

class Around(GetAttr):
    "Has no groups of its own, and asks the optimizer within for what it lacks"
    _default = 'opt'
    def __init__(self, opt): self.opt = opt
    def step(self, closure=None):
        for p,*_ in self.opt.all_params(with_grad=True): p.grad.data.mul_(.5)
        self.opt.step()
    def zero_grad(self): self.opt.zero_grad()

@pytest.mark.parametrize('opt', [SGD, partial(OptimWrapper, opt=torch.optim.SGD)])
def test_an_optimizer_around_another_in_several_steps(opt):
    make = lambda: image_learner(opt_func=lambda ps, **kwargs: Around(opt(ps, **kwargs)))
    fit = lambda learn: learn.fit(4, 1e-2)
    (_,there),(learn,here) = told(make, fit),told(make, fit, True, steps_per_execution=4)
    assert not [k for k in there if not agree(there[k], here[k], 1e-4)]
    report = learn.xla_report()
    assert all('comes or goes' in why for why in report.plain), report.plain   # in the first step, the optimizer's state
    assert report.per_batch('training')['executions'] < .5

class Inside(torch.optim.Optimizer):
    "An optimizer around another one, as SAM's of public code; the inner one's groups are its own"
    def __init__(self, params, lr=1e-3, inner=partial(torch.optim.SGD, momentum=.9)):
        super().__init__(params, dict(lr=lr))
        self.base = inner(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)
    def step(self, closure=None): self.base.step()

class Slow(Inside):
    "Lookahead: every third step the weights go half of the way from those of three steps before"
    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr, torch.optim.AdamW)
        self.n,self.slow = 0,None
    def step(self, closure=None):
        if self.slow is None: self.slow = [[p.data.clone() for p in g['params']] for g in self.param_groups]
        self.base.step()
        self.n += 1
        if self.n%3: return
        for g,slow in zip(self.param_groups, self.slow):
            for p,q in zip(g['params'], slow):
                q.add_(.5*(p.data-q))
                p.data.copy_(q)

class Signs(torch.optim.Optimizer):
    "The user's own arithmetic, with numbers in a pair"
    def __init__(self, params, lr=1e-3, betas=(.9, .99)): super().__init__(params, dict(lr=lr, betas=betas))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            a,b = g['betas']
            for p in g['params']:
                if 'avg' not in self.state[p]: self.state[p]['avg'] = torch.zeros_like(p)
                avg = self.state[p]['avg']
                p.add_(torch.tanh(100*(a*avg + (1-a)*p.grad)), alpha=-g['lr'])
                avg.mul_(b).add_(p.grad, alpha=1-b)

class Bag: pass

class Elsewhere(torch.optim.SGD):
    "Its momentum is in an object of the user's own"
    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)
        self.bag = Bag()
        self.bag.avg = [torch.zeros_like(p) for g in self.param_groups for p in g['params']]
    @torch.no_grad()
    def step(self, closure=None):
        for p,avg in zip(self.param_groups[0]['params'], self.bag.avg):
            avg.mul_(.9).add_(p.grad)
            p.sub_(self.param_groups[0]['lr']*avg)

@pytest.mark.parametrize('opt', [Inside, Slow, Signs, Elsewhere])
def test_optimizers_of_the_users_own(opt):
    "The CPU's losses and weights, replayed, also with state that nobody can find"
    g = torch.Generator().manual_seed(0)
    x,y = torch.randn(96, 6, generator=g),torch.randint(3, (96,), generator=g)
    results = []
    for on_xla in (False, True):
        set_seed(0)
        dls = DataLoaders.from_dsets(list(zip(x[:80], y[:80])), list(zip(x[80:], y[80:])), bs=8, num_workers=0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=partial(OptimWrapper, opt=opt))
        if on_xla: learn.to_xla()
        with learn.no_logging(), learn.no_bar(): learn.fit_one_cycle(3, 1e-2)
        results.append(fetch([torch.stack(list(learn.recorder.losses)), *learn.model.parameters()]))
    for a,b in zip(*results): test_close(a, b, eps=1e-4)
    assert sum(learn.xla_report().plain.values()) <= 2, learn.xla_report()

def critic(): return nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(.2), nn.Linear(8, 1))

def both(make):
    "What `make` gives on the CPU and on XLA"
    res = []
    for xla in (False, True):
        set_seed(0, reproducible=True)
        res.append([torch.as_tensor(t).detach().cpu() for t in make(xla)])
    return zip(*res)

@pytest.mark.parametrize('frozen', [False, True])
def test_critic_in_the_loss(frozen):
    "A second network, which the step only leaves gradients with: nobody zeroes them"
    def make(xla):
        G,D = nn.Linear(8, 2),critic().requires_grad_(not frozen)
        items = list(zip(torch.randn(64, 8), torch.randn(64, 1)))
        learn = Learner(DataLoaders.from_dsets(items, items, bs=16, num_workers=0), G, loss_func=lambda p, y: F.mse_loss(D(p), y))
        learn.remove_cb(ProgressCallback)
        if xla: D.to(learn.to_xla().dls.device)
        with learn.no_logging(): learn.fit(3, 1e-2)
        return [*learn.recorder.losses, *G.parameters(), *(p.grad for p in D.parameters() if not frozen)]
    for a,b in both(make): assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)

def test_gan_of_two_learners():
    def make(xla):
        G,D = nn.Linear(8, 2),critic()
        z,real = torch.randn(64, 8),torch.randn(64, 2)*.3+1
        dls = lambda a: DataLoaders.from_dsets(list(zip(a, z)), list(zip(a, z)), bs=16, num_workers=0)
        gen = Learner(dls(z), G, loss_func=lambda p, y: F.softplus(-D(p)).mean())
        dis = Learner(dls(real), D, loss_func=lambda p, y: F.softplus(-p).mean() + F.softplus(D(G(y).detach())).mean())
        losses = []
        if xla: gen.to_xla(), dis.to_xla()
        for learn in (dis, gen)*3:
            learn.remove_cb(ProgressCallback)
            with learn.no_logging(): learn.fit(1, 1e-2)
            losses += [float(l) for l in learn.recorder.losses]
        return [*losses, *G.parameters(), *D.parameters()]
    for a,b in both(make): assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)

class TwiceDifferentiable(Learner):
    def _backward(self): self.loss_grad.backward(create_graph=True)

class Curvature(Callback):
    "A step for two batches, by the slope of the squared gradients: through the graphs of both"
    def after_backward(self):
        if self.training and self.train_iter%2 == 0: raise CancelBatchException
    def before_step(self):
        ps = list(self.model.parameters())
        slopes = torch.autograd.grad(sum((p.grad**2).sum() for p in ps), ps)
        for p,s in zip(ps, slopes): p.grad = (p.grad + s).detach()

@pytest.mark.parametrize('kwargs', [{}, dict(steps_per_execution=2)])
def test_gradients_with_a_graph_are_for_the_next_step(kwargs, recorded):
    def make():
        dls = image_dls(n=8*8, n_valid=8, bs=8, shuffle=False)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4))
        return TwiceDifferentiable(dls, model, loss_func=CrossEntropyLossFlat(), cbs=Curvature(), opt_func=SGD)
    fit = lambda learn: learn.fit(2, .1)
    (_,there),(learn,here) = told(make, fit),told(make, fit, True, **kwargs)
    assert not [k for k in there if not agree(there[k], here[k], 1e-4)]
    assert any('gradients that have a graph' in why for why in learn.xla_report().plain)

class FreezesAgain(Callback):
    "`freeze_to` clears the optimizer's state"
    def before_epoch(self): self.learn.freeze_to(-1 - self.epoch//2)

def test_state_that_is_cleared_within_a_fit_is_no_new_kind_of_step():
    make = lambda: image_learner(image_dls(n=8*8, n_valid=8, bs=8), opt_func=partial(SGD, mom=.9), cbs=FreezesAgain())
    fit = lambda learn: learn.fit(4, .1)
    (_,there),(learn,here) = told(make, fit),told(make, fit, True, steps_per_execution=4)
    assert not [k for k in there if not agree(there[k], here[k], 1e-4)]
    assert not learn.xla_report().plain and learn.xla_report().costs['training'].executions < 32-8, learn.xla_report()
