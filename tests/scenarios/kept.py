"What callbacks keep, draw and do beside computing"
import random, time
from fastai.callback.all import *
from fastai.callback.hook import ActivationStats
from .base import *
from .callbacks import Train

# Metrics and what is kept

@scenario
def average_of_the_loss_by_hand():
    class Keeps(Train):
        def before_fit(self): self.avg = AvgLoss()
        def before_epoch(self): self.avg.reset()
        def after_loss(self): self.avg.accumulate(self.learn)
    return learner(cbs=Keeps())
scenarios['average_of_the_loss_by_hand'].seen = lambda l: l.keeps.avg.value

@scenario
def smooth_average_of_the_loss_by_hand():
    class Keeps(Train):
        def before_fit(self): self.avg = AvgSmoothLoss(); self.avg.reset()
        def after_loss(self): self.avg.accumulate(self.learn)
    return learner(cbs=Keeps())
scenarios['smooth_average_of_the_loss_by_hand'].seen = lambda l: l.keeps.avg.value

@scenario
def list_of_losses_within_the_step():
    class Keeps(Train):
        def before_fit(self): self.all = []
        def after_loss(self): self.all.append(self.loss.detach())
    return learner(cbs=Keeps())
scenarios['list_of_losses_within_the_step'].seen = lambda l: torch.stack(l.keeps.all)

@scenario(to=dict(steps_per_execution=4))
def norm_of_gradients_of_several_steps():
    class Norm(Train):
        def before_fit(self): self.all = []
        def before_step(self): self.norm = sum(p.grad.norm() for p in self.model.parameters())
        def after_batch(self): self.all.append(self.norm.clone())
    return learner(data=dls(n=8*8), cbs=Norm())
scenarios['norm_of_gradients_of_several_steps'].seen = lambda l: torch.stack(l.norm.all)

@scenario(to=dict(steps_per_execution=4))
def losses_of_several_steps():
    class Loss2:
        def __call__(self, pred, targ):
            self.a,self.b = F.cross_entropy(pred, targ),pred.square().mean()
            return self.a+self.b
    class Keeps(Train):
        def before_fit(self): self.all = []
        def after_batch(self): self.all.append((self.learn.loss_func.a.detach().clone(), self.learn.loss_func.b.detach().clone()))
    return learner(data=dls(n=8*8), loss_func=Loss2(), cbs=Keeps())
scenarios['losses_of_several_steps'].seen = lambda l: l.keeps.all

@scenario
def loss_metrics():
    class Loss2:
        def __call__(self, pred, targ):
            self.a,self.b = F.cross_entropy(pred, targ),pred.square().mean()
            return self.a+self.b
    return learner(loss_func=Loss2(), metrics=LossMetrics('a,b'))

@scenario(to=dict(steps_per_execution=4))
def loss_metrics_of_several_steps():
    class Loss2:
        def __call__(self, pred, targ):
            self.a,self.b = F.cross_entropy(pred, targ),pred.square().mean()
            return self.a+self.b
    return learner(data=dls(n=8*8, n_valid=8*8), loss_func=Loss2(), metrics=LossMetrics('a,b'))

@scenario
def gradient_of_the_loss():
    class Keeps(Train):
        def before_fit(self): self.all = []
        def after_loss(self): self.learn.loss_grad = self.loss_grad*3
        def after_batch(self): self.all.append(self.loss_grad.detach().clone())
    return learner(cbs=Keeps())
scenarios['gradient_of_the_loss'].seen = lambda l: torch.stack(l.keeps.all)

# What a step draws or reads

@scenario
def draws_of_random():
    class D(Train):
        def after_loss(self): self.learn.loss_grad = self.loss_grad*random.random()
    return learner(cbs=D())

@scenario
def draws_of_a_generator_of_torch():
    class D(Train):
        def before_fit(self): self.g = torch.Generator().manual_seed(0)
        def after_loss(self): self.learn.loss_grad = self.loss_grad*torch.rand(1, generator=self.g).item()
    return learner(cbs=D())

@scenario
def draws_a_host_tensor_before_the_batch():
    class D(Train):
        def before_batch(self): self.lam = torch.rand(8)
        def after_pred(self): self.learn.pred = self.pred*self.lam.to(self.pred.device)[:,None]
    return learner(cbs=D())

@scenario
def coin_of_stochastic_depth():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)
        def forward(self, x): return x if self.training and random.random() < .5 else x+self.lin(x)
    return learner(mlp(Block()))

@scenario
def time_of_day():
    class Slow(Train):
        def before_fit(self): self.t0 = time.time()
        def after_loss(self):
            if time.time()-self.t0 > 1e4: self.learn.loss_grad = self.loss_grad*0
    return learner(cbs=Slow())

@scenario
def average_that_is_0_first():
    class Avg(Train):
        def before_fit(self): self.avg = 0.
        def after_loss(self): self.avg = self.avg*.9 + self.loss.detach()*.1
    return learner(cbs=Avg())
scenarios['average_that_is_0_first'].seen = lambda l: l.avg.avg

@scenario
def simple_namespace_on_a_callback():
    class NS(Train):
        def before_fit(self): self.s = SimpleNamespace(avg=0., n=0)
        def after_loss(self): self.s.avg = self.s.avg*.9 + self.loss.detach()*.1
        def before_step(self): self.s.n += 1
    return learner(cbs=NS())
scenarios['simple_namespace_on_a_callback'].seen = lambda l: [torch.as_tensor(l.ns.s.avg), l.ns.s.n]

@scenario
def auxiliary_losses_in_a_list():
    aux = []
    class Block(nn.Module):
        def forward(self, x):
            aux.append(x.square().mean())
            return x
    class Adds(Train):
        def before_batch(self): aux.clear()
        def after_loss(self): self.learn.loss_grad = self.loss_grad + .1*sum(aux)
        def after_batch(self): aux.clear()
    return learner(mlp(Block()), cbs=Adds())

@scenario
def list_made_before_the_batch():
    class Lists(Train):
        def before_batch(self): self.new = []
        def after_loss(self): self.new.append(1.)
    return learner(cbs=Lists())

@scenario
def list_made_within_the_step():
    class Halves(nn.Module):
        def forward(self, x):
            halves = []
            for o in x.chunk(2): halves.append(o.tanh())
            return torch.cat(halves)
    return learner(mlp(Halves()))

@scenario
def auxiliary_losses_in_a_list_of_the_model():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net,self.aux = mlp(),[]
        def forward(self, x):
            self.aux = []
            y = self.net(x)
            self.aux.append(y.square().mean())
            return y
    class Adds(Train):
        def after_loss(self): self.learn.loss_grad = self.loss_grad + .1*sum(self.model.aux)
    return learner(Net(), cbs=Adds())

@scenario
def gradient_penalty():
    class GP(Train):
        def before_batch(self): self.learn.xb = (self.x.requires_grad_(),)
        def after_loss(self):
            g, = torch.autograd.grad(self.loss_grad, self.x, create_graph=True)
            self.learn.loss_grad = self.loss_grad + g.square().sum()
    return learner(cbs=GP())

@scenario
def sharpness_aware():
    class SAM(Train):
        def after_backward(self):
            ps = [p for p in self.model.parameters() if p.grad is not None]
            with torch.no_grad():
                n = torch.stack([p.grad.norm() for p in ps]).norm()
                es = [p.grad*.05/(n+1e-12) for p in ps]
                for p,e in zip(ps, es): p.add_(e)
            self.model.zero_grad()
            self.learn.loss_func(self.model(*self.xb), *self.yb).backward()
            with torch.no_grad():
                for p,e in zip(ps, es): p.sub_(e)
    return learner(cbs=SAM(), opt_func=SGD)

@scenario
def old_gradients_in_a_dict():
    class Prev(Train):
        def before_fit(self): self.old = {}
        def before_step(self):
            for n,p in self.model.named_parameters():
                g = p.grad.clone()
                if n in self.old: p.grad.add_(self.old[n], alpha=.1)
                self.old[n] = g
    return learner(cbs=Prev())

@scenario
def saves_within_the_step():
    import tempfile
    d = tempfile.mkdtemp()
    class Saves(Train):
        def before_fit(self): self.n = 0
        def after_loss(self): np.save(f'{d}/{len(os.listdir(d))}.npy', np.ones(3))
    l = learner(cbs=Saves())
    l.saved = d
    return l
scenarios['saves_within_the_step'].seen = lambda l: len(os.listdir(l.saved))

@scenario
def pickles_within_the_step():
    import tempfile
    d = tempfile.mkdtemp()
    class Saves(Train):
        def after_loss(self): save_pickle(f'{d}/{len(os.listdir(d))}.pkl', [1, 2])
    l = learner(cbs=Saves())
    l.saved = d
    return l
scenarios['pickles_within_the_step'].seen = lambda l: len(os.listdir(l.saved))

@scenario
def terminates_on_nan(): return learner(cbs=TerminateOnNaNCallback())
