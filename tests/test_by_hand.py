"What users do by hand: backward passes, copies of modules, leaves on the host, gradients of the batch. As on the CPU"
import re
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from by_log import *

class ByHand(Callback):
    "A backward pass in place of the learner's"
    def before_backward(self):
        self.learn.loss_grad.backward()
        self.by()
        raise CancelBackwardException()
    def by(self): pass
    def ps(self): return list(self.model.parameters())

class DropsSome(ByHand):
    def by(self): self.ps()[0].grad = None
class Halves(ByHand):
    def by(self):
        for p in self.ps(): p.grad.mul_(.5)
class LooksLater(ByHand):
    def before_step(self): self.norms = [*getattr(self, 'norms', []), sum(p.grad.norm() for p in self.ps())]
class DropsLater(ByHand):
    def after_step(self): self.ps()[0].grad = None
class SecondOptimizer(ByHand):
    def before_fit(self): self.o = torch.optim.SGD(self.ps()[:1], lr=.01)
    def by(self):
        self.o.step()
        self.o.zero_grad()
class Adds(ByHand):
    "To zeros that are there for its sake"
    def before_backward(self):
        for p in self.ps():
            if p.grad is not None: p.grad.add_(.1)
        super().before_backward()

@pytest.mark.parametrize('cb', [DropsSome, Halves, LooksLater, DropsLater, SecondOptimizer, Adds])
def test_a_backward_by_hand(cb):
    "Each second step was lost: what `zeros_shown` had put there looked untouched, as a placeholder's version does not go up"
    learn = agree(lambda: dict(cbs=cb, see=lambda l: list(getattr(l.cbs[-1], 'norms', []))), branches=None, tol=1e-6)
    assert counts(learn)[True]['replayed'] >= 28

def host_leaf():
    "Weights of a loss that live on the host, and are trained there"
    w,seen = torch.zeros(4, requires_grad=True),[]
    opt = torch.optim.SGD([w], lr=.05, momentum=.9)
    class Weighted(nn.Module):
        def forward(self, p, t):
            v = w.to(p.device)[:p.shape[-1]]
            return (torch.exp(-v)*((p-t)**2).mean(0) + v).sum()
    class Trains(Callback):
        def after_step(self):
            seen.append(w.grad.clone())
            opt.step()
            opt.zero_grad()
    return dict(loss_func=Weighted, cbs=Trains, see=lambda l: [w.detach().clone(), *seen])

def test_a_leaf_of_the_host_in_a_loss():
    "Its gradient had those of two traces added, in the third batch; the backward pass reads it, so it is no step to record"
    learn = agree(host_leaf, branches=None, tol=1e-6)
    assert counts(learn)[True] == {'refused': 2, 'retraced': 28} and re.search('backward at .* reads a value', str(learn.xla_report()))

class CopiesByDict(nn.Module):
    "As `higher` makes its functional modules"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(4, 8),nn.Linear(8, 2)
    def forward(self, x):
        c = nn.Linear.__new__(nn.Linear)
        c.__dict__.update(self.a.__dict__)
        c.__dict__['_parameters'] = dict(self.a._parameters)
        c._parameters['weight'] = self.a.weight*.5
        return self.b(torch.tanh(c(x)))

class Replicates(CopiesByDict):
    def forward(self, x):
        c = self.a._replicate_for_data_parallel()
        c.weight,c.bias = self.a.weight*.5,self.a.bias
        return self.b(torch.tanh(c(x)))

class GradOfBatch(nn.Module):
    "The batch itself requires gradients, and a value is read"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.n = nn.Linear(4, 8),nn.Linear(8, 2),0
    def forward(self, x):
        x.requires_grad_()
        self.read(x)
        return self.b(torch.tanh(self.a(x)))
    def read(self, x): self.n += x.sum().item() > 0

class Checkpoints(GradOfBatch):
    def part(self, x): return torch.tanh(self.a(x))
    def forward(self, x):
        self.n += 1
        return self.b(checkpoint(self.part, x.requires_grad_(), use_reentrant=True))

class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return times(x, 3)
    @staticmethod
    def backward(ctx, g): return g*8
def times(x, n): return x if n == 0 else times(x*2, n-1)

class Recursive(CopiesByDict):
    def forward(self, x): return self.b(Thrice.apply(torch.tanh(self.a(x))))

def data_of_four():
    x = torch.randn(52, 4)
    dsets = [TensorDataset(o, o[:,:2]*2) for o in (x[:40], x[40:])]
    return DataLoaders.from_dsets(*dsets, bs=4, shuffle=False, num_workers=0, device='cpu')

@pytest.mark.parametrize('model', [CopiesByDict, Replicates, GradOfBatch, Checkpoints, Recursive])
def test_models(model): agree(lambda: dict(model=model, dls=data_of_four), branches=None, tol=1e-6)

class KeepsInGroup(torch.optim.Optimizer):
    "Keeps a tensor of the step in its group, and looks at a value"
    def __init__(self, ps, lr=1e-2): super().__init__(ps, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        g = self.param_groups[0]
        n = sum(p.grad.pow(2).sum() for p in g['params'])
        if 'prev' in g: float(n-g['prev'])
        g['prev'] = n
        for p in g['params']: p.add_(p.grad, alpha=-g['lr'])

def test_an_optimizer_that_keeps_a_tensor_in_its_group():
    "The process died in the next trace: the tensor of the one before was forgotten"
    agree(lambda: dict(opt_func=partial(OptimWrapper, opt=KeepsInGroup)), branches=None, tol=1e-6)

def test_an_optimizer_that_counts_with_a_hyper_parameter():
    "`range(ns_steps)` was given a float"
    class TwoWeights(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = nn.Linear(6, 8, bias=False),nn.Linear(8, 1, bias=False)
        def forward(self, x): return self.b(torch.relu(self.a(x)))
    learn = agree(lambda: dict(model=TwoWeights, opt_func=partial(OptimWrapper, opt=torch.optim.Muon)), branches=None, cpu=False, tol=1e-2)
    assert counts(learn)[True]['replayed'] >= 28

@pytest.mark.parametrize('opt', [torch.optim.Rprop, torch.optim.ASGD])
def test_state_that_begins_with_the_learning_rate(opt):
    "It began with that of before the fit, not with that which a schedule has set for the first step"
    kw = dict(opt_func=partial(OptimWrapper, opt=opt), cbs=lambda: ParamScheduler({'lr': SchedLin(1e-3, 5e-3)}))
    def story(): return dict(model=lambda: nn.Linear(6, 1), **kw)
    (a,_),(b,_),(c,_) = run(story, False, xla=False),run(story, False),run(story, 'auto')
    for x,y,z in zip(a['losses'], b['losses'], c['losses']): assert max(abs(x-y), abs(x-z)) < 1e-4*max(1, abs(x))
