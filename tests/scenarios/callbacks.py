"Callbacks: their own numbers, tensors, modules and optimizers"
import random, time
from collections import deque
from math import cos
from fastai.callback.all import *
from .base import *
from .losses import within

class Train(Callback): run_valid = False

@scenario
def weight_of_an_attribute_from_a_list():
    class W(Train):
        ws = [1., .5, .25, 2., .1]
        def before_epoch(self): self.k = self.epoch
        def after_loss(self): self.learn.loss_grad = self.loss_grad*self.ws[self.k]
    return learner(cbs=W())

@scenario
def own_counter_in_a_list():
    class W(Train):
        ws = [1+.1*i for i in range(40)]
        def before_fit(self): self.k = 0
        def after_batch(self): self.k += 1
        def after_loss(self): self.learn.loss_grad = self.loss_grad*self.ws[self.k]
    return learner(cbs=W())

@scenario
def own_counter_every_seventh():
    class W(Train):
        ws = [1., .5, .25]
        def before_fit(self): self.k = 0
        def after_batch(self): self.k += 1
        def after_loss(self): self.learn.loss_grad = self.loss_grad*self.ws[self.k//7]
    return learner(cbs=W())

@scenario
def clip_by_a_list():
    class Clip(Train):
        maxs = [1., .1, .01, .001]
        def before_step(self): nn.utils.clip_grad_norm_(self.model.parameters(), self.maxs[self.epoch])
    return learner(cbs=Clip())

@scenario(cpu=False)
def dropout_by_an_attribute():
    class Drop(Train):
        p = .1
        def before_epoch(self): self.p = .1+.2*self.epoch
        def after_pred(self): self.learn.pred = F.dropout(self.pred, p=self.p)
    return learner(cbs=Drop())

@scenario
def top_k_of_an_attribute():
    class TopK(Callback):
        def __init__(self): self.k = 4
        def before_epoch(self): self.k = 4-self.epoch
        def after_loss(self):
            l = F.cross_entropy(self.pred, self.y, reduction='none').topk(self.k)[0].mean()
            self.learn.loss_grad = self.learn.loss = l
    return learner(cbs=TopK())

@scenario
def top_k_of_each_batch():
    class TopK(Callback):
        def __init__(self): self.k = 4
        def before_batch(self): self.k = 8-self.iter
        def after_loss(self):
            l = F.cross_entropy(self.pred, self.y, reduction='none').topk(self.k)[0].mean()
            self.learn.loss_grad = self.learn.loss = l
    return learner(cbs=TopK())

@scenario
def ramp_from_one_within_an_epoch():
    class Ramp(Train):
        def after_loss(self): self.learn.loss_grad = self.loss_grad*max(.1, 1-.1*max(0, self.train_iter-6))
    return learner(cbs=Ramp())

@scenario
def reduces_on_plateau_by_hand():
    class Plateau(Callback):
        def before_fit(self): self.best,self.factor = float('inf'),1.
        def after_epoch(self):
            v = self.recorder.values[-1][1] if self.recorder.values else 0.
            if v > self.best-.5: self.factor *= .5
            self.best = min(self.best, v)
        def after_loss(self):
            if self.training: self.learn.loss_grad = self.loss_grad*self.factor
    return learner(cbs=Plateau())

# Modules of callbacks

class Teaches(Train):
    def __init__(self, teacher): self.teacher = teacher
    def before_fit(self): self.teacher.to(self.model[1].weight.device)
    def after_loss(self):
        with torch.no_grad(): t = self.teacher(self.x)
        self.learn.loss_grad = self.loss_grad + F.mse_loss(self.pred, t)

def teacher(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Hardtanh())

@scenario
def teacher_trains_and_evaluates():
    def change(l, i): l.teaches.teacher.train(i < 6)
    return learner(cbs=[Teaches(teacher().eval()), within(change)])

@scenario
def setting_of_a_teachers_layer():
    return learner(cbs=[Teaches(teacher().eval()), within(lambda l, i: setattr(l.teaches.teacher[3], 'max_val', .1*i))])

@scenario
def teacher_in_a_list():
    class Several(Teaches):
        def before_fit(self): [t.to(self.model[1].weight.device) for t in self.teacher]
        def after_loss(self):
            with torch.no_grad(): t = self.teacher[0](self.x)
            self.learn.loss_grad = self.loss_grad + F.mse_loss(self.pred, t)
    return learner(cbs=[Several([teacher().eval()]), within(lambda l, i: setattr(l.several.teacher[0][3], 'max_val', .1*i))])

@scenario
def teacher_in_a_closure():
    t = teacher().eval()
    class Of(Train):
        def before_fit(self): t.to(self.model[1].weight.device)
        def after_loss(self): self.learn.loss_grad = self.loss_grad + F.mse_loss(self.pred, t(self.x).detach())
    return learner(cbs=[Of(), within(lambda l, i: setattr(t[3], 'max_val', .1*i))])

@scenario
def layers_of_a_teacher_by_hand():
    class Of(Teaches):
        def after_loss(self): self.learn.loss_grad = self.loss_grad + F.mse_loss(self.pred, F.linear(self.x.flatten(1), self.teacher[1].weight).detach())
    def change(l, i):
        with torch.no_grad(): l.of.teacher[1].weight.mul_(.5)
    return learner(cbs=[Of(teacher().eval()), within(change)])

@scenario
def critic_unfrozen():
    class Critic(Teaches):
        def after_loss(self): self.learn.loss_grad = self.loss_grad + F.mse_loss(self.pred, self.teacher(self.x))
    def change(l, i): l.critic.teacher.requires_grad_(i > 6)
    c = teacher().eval()
    c.requires_grad_(False)
    return learner(cbs=[Critic(c), within(change)])

@scenario
def hook_added_to_a_teacher():
    def change(l, i): l.teaches.teacher[1].register_forward_hook(lambda m, x, y: y*.5)
    return learner(cbs=[Teaches(teacher().eval()), within(change, 6)])

@scenario
def exponential_average_of_weights():
    class EMA(Train):
        def before_fit(self): self.avg = [p.detach().clone() for p in self.model.parameters()]
        def after_step(self):
            with torch.no_grad():
                for a,p in zip(self.avg, self.model.parameters()): a.lerp_(p, .1)
    return learner(cbs=EMA())
scenarios['exponential_average_of_weights'].seen = lambda l: l.ema.avg

@scenario
def exponential_average_model_after_batches():
    class EMA(Train):
        def before_fit(self): self.ema_model = deepcopy(self.model)
        def after_batch(self):
            with torch.no_grad():
                for a,p in zip(self.ema_model.parameters(), self.model.parameters()): a.lerp_(p, .1)
    return learner(cbs=EMA())
scenarios['exponential_average_model_after_batches'].seen = lambda l: [p.detach() for p in l.ema.ema_model.parameters()]

@scenario
def exponential_average_helper():
    class Helper:
        def __init__(self, model, decay=.9): self.decay,self.shadow = decay,{n: p.detach().clone() for n,p in model.named_parameters()}
        def update(self, model):
            for n,p in model.named_parameters(): self.shadow[n] = self.decay*self.shadow[n] + (1-self.decay)*p.detach()
    class EMA(Train):
        def before_fit(self): self.helper = Helper(self.model)
        def after_step(self): self.helper.update(self.model)
    return learner(cbs=EMA())
scenarios['exponential_average_helper'].seen = lambda l: list(l.ema.helper.shadow.values())

@scenario
def averaged_model_of_torch():
    class SWA(Train):
        def before_fit(self): self.swa = torch.optim.swa_utils.AveragedModel(self.model)
        def after_batch(self):
            if self.iter == 4: self.swa.update_parameters(self.model)
    return learner(cbs=SWA())
scenarios['averaged_model_of_torch'].seen = lambda l: [p.detach() for p in l.swa.swa.module.parameters()]

@scenario
def moco_pointer():
    class MoCo(Train):
        def before_fit(self): self.queue,self.ptr = torch.zeros(24, 4, device=self.model[1].weight.device),0
        def after_pred(self):
            q = self.queue.clone()
            self.learn.pred = self.pred + .1*(self.pred@q.T).softmax(1)@q
        def after_batch(self):
            self.queue[self.ptr:self.ptr+8] = self.pred.detach()
            self.ptr = (self.ptr+8) % 24
    return learner(cbs=MoCo())

@scenario
def moco_pointer_within_the_step():
    class MoCo(Train):
        def before_fit(self): self.queue,self.ptr = torch.zeros(24, 4, device=self.model[1].weight.device),0
        def after_loss(self):
            self.learn.loss_grad = self.loss_grad + .1*(self.pred@self.queue.clone().T).square().mean()
            self.queue[self.ptr:self.ptr+8] = self.pred.detach()
            self.ptr = (self.ptr+8) % 24
    return learner(cbs=MoCo())

@scenario
def second_torch_sgd():
    class Aux(Train):
        def before_fit(self):
            self.w = nn.Parameter(torch.ones(4, device=self.model[1].weight.device))
            self.opt2 = torch.optim.SGD([self.w], lr=.1)
        def after_pred(self): self.learn.pred = self.pred*self.w
        def after_step(self):
            self.opt2.step()
            self.opt2.zero_grad()
        def before_epoch(self): self.opt2.param_groups[0]['lr'] = .1/(1+self.epoch)
    return learner(cbs=Aux())
scenarios['second_torch_sgd'].seen = lambda l: l.aux.w.detach()

def _second(make):
    class Aux(Train):
        def before_fit(self):
            self.w = nn.Parameter(torch.ones(4, device=self.model[1].weight.device))
            self.opt2 = make([self.w])
        def after_pred(self): self.learn.pred = self.pred*self.w
        def after_step(self):
            self.opt2.step()
            self.opt2.zero_grad()
    return learner(cbs=Aux())
@scenario
def second_torch_momentum(): return _second(partial(torch.optim.SGD, lr=.1, momentum=.9))
@scenario
def second_torch_adam(): return _second(partial(torch.optim.Adam, lr=.1))
for n in ('second_torch_momentum', 'second_torch_adam'): scenarios[n].seen = lambda l: l.aux.w.detach()

@scenario
def second_torch_scheduler():
    class Aux(Train):
        def before_fit(self):
            self.w = nn.Parameter(torch.ones(4, device=self.model[1].weight.device))
            self.opt2 = torch.optim.SGD([self.w], lr=.1)
            self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt2, .9)
        def after_pred(self): self.learn.pred = self.pred*self.w
        def before_step(self): self.opt2.step()
        def after_batch(self):
            self.opt2.zero_grad()
            self.sched.step()
    return learner(cbs=Aux())
scenarios['second_torch_scheduler'].seen = lambda l: l.aux.w.detach()

@scenario
def second_fastai_optimizer():
    class Aux(Train):
        def before_fit(self):
            self.w = nn.Parameter(torch.ones(4, device=self.model[1].weight.device))
            self.opt2 = Adam([self.w], lr=.1)
        def after_pred(self): self.learn.pred = self.pred*self.w
        def after_step(self):
            self.opt2.step()
            self.opt2.zero_grad()
    return learner(cbs=Aux())
scenarios['second_fastai_optimizer'].seen = lambda l: l.aux.w.detach()

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
def refused_after_a_sum():
    class Keeps(Train):
        def before_fit(self): self.avg = AvgLoss(); self.avg.reset()
        def after_loss(self):
            self.avg.accumulate(self.learn)
            if self.loss.item() > 1e9: raise CancelFitException()
    return learner(cbs=Keeps())
scenarios['refused_after_a_sum'].seen = lambda l: l.keeps.avg.value

@scenario
def list_of_losses():
    class Keeps(Train):
        def before_fit(self): self.all = []
        def after_batch(self): self.all.append(self.loss.detach())
    return learner(cbs=Keeps())
scenarios['list_of_losses'].seen = lambda l: torch.stack(l.keeps.all)

@scenario
def list_of_losses_within_the_step():
    class Keeps(Train):
        def before_fit(self): self.all = []
        def after_loss(self): self.all.append(self.loss.detach())
    return learner(cbs=Keeps())
scenarios['list_of_losses_within_the_step'].seen = lambda l: torch.stack(l.keeps.all)

@scenario
def norm_of_gradients():
    class Norm(Train):
        def before_fit(self): self.all = []
        def before_step(self): self.norm = sum(p.grad.norm() for p in self.model.parameters())
        def after_batch(self): self.all.append(self.norm.clone())
    return learner(cbs=Norm())
scenarios['norm_of_gradients'].seen = lambda l: torch.stack(l.norm.all)

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

@scenario(to=dict(steps_per_execution=4))
def activations_of_several_steps():
    from fastai.callback.hook import ActivationStats
    return learner(data=dls(n=8*8), cbs=ActivationStats(modules=None))
scenarios['activations_of_several_steps'].seen = lambda l: [list(map(dict, s)) for s in l.activation_stats.stats]

@scenario(to=dict(steps_per_execution=4))
def list_of_losses_of_several_steps():
    class Keeps(Train):
        def before_fit(self): self.all = []
        def after_batch(self): self.all.append(self.loss.detach())
    return learner(data=dls(n=8*8), cbs=Keeps())
scenarios['list_of_losses_of_several_steps'].seen = lambda l: torch.stack(l.keeps.all)

@scenario(to=dict(steps_per_execution=4))
def weight_by_batch_of_several_steps():
    class W(Train):
        ws = [1+.1*i for i in range(40)]
        def after_loss(self): self.learn.loss_grad = self.loss_grad*self.ws[self.train_iter]
    return learner(data=dls(n=8*8), cbs=W())

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
def draws_of_numpy():
    class D(Train):
        def after_loss(self): self.learn.loss_grad = self.loss_grad*float(np.random.rand())
    return learner(cbs=D())

@scenario
def draws_of_random():
    class D(Train):
        def after_loss(self): self.learn.loss_grad = self.loss_grad*random.random()
    return learner(cbs=D())

@scenario
def draws_of_a_generator_of_numpy():
    class D(Train):
        def before_fit(self): self.rng = np.random.default_rng(0)
        def after_loss(self): self.learn.loss_grad = self.loss_grad*self.rng.random()
    return learner(cbs=D())

@scenario
def draws_of_a_generator_of_torch():
    class D(Train):
        def before_fit(self): self.g = torch.Generator().manual_seed(0)
        def after_loss(self): self.learn.loss_grad = self.loss_grad*torch.rand(1, generator=self.g).item()
    return learner(cbs=D())

@scenario
def draws_before_the_batch():
    class D(Train):
        def before_batch(self): self.lam = random.random()
        def after_loss(self): self.learn.loss_grad = self.loss_grad*self.lam
    return learner(cbs=D())

@scenario
def draws_a_tensor_before_the_batch():
    class D(Train):
        def before_batch(self): self.lam = torch.rand(8).to(self.x.device)
        def after_pred(self): self.learn.pred = self.pred*self.lam[:,None]
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
        def before_batch(self): self.learn.xb = (self.x.detach().requires_grad_(),)
        def after_loss(self):
            g, = torch.autograd.grad(self.loss_grad, self.x, create_graph=True)
            self.learn.loss_grad = self.loss_grad + g.square().sum()
    return learner(cbs=GP())

@scenario
def gradient_penalty_in_the_loss():
    class GP(Train):
        def after_loss(self):
            x = self.x.detach().requires_grad_()
            g, = torch.autograd.grad(F.cross_entropy(self.model(x), self.y), x, create_graph=True)
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
def parameters_frozen_in_a_callback():
    class Freezes(Train):
        def before_epoch(self):
            for p in self.model[1].parameters(): p.requires_grad_(self.epoch % 2 == 1)
    return learner(cbs=Freezes())

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

@scenario
def gradient_accumulation(): return learner(cbs=GradientAccumulation(16))

@scenario
def gradient_clip(): return learner(cbs=GradientClip(.1))
