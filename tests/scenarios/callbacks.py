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
def layers_of_a_teacher_by_hand():
    class Of(Teaches):
        def after_loss(self):
            t = F.linear(self.x.flatten(1), self.teacher[1].weight).detach()
            self.learn.loss_grad = self.loss_grad + F.mse_loss(self.pred, t)
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

class Averages(Train):
    "Keeps an average of the loss in an object of its own"
    def before_fit(self): self.kept = SimpleNamespace(by=.9, avg=torch.zeros((), device=self.model[1].weight.device), n=0)
    def after_loss(self):
        self.kept.avg = self.kept.avg*self.kept.by + self.loss.detach()
        self.kept.n += 1
        self.learn.loss_grad = self.loss_grad/(1+self.kept.n*.1)

@scenario
def helper_in_whose_place_another_is_put():
    def change(l, i): l.averages.kept = SimpleNamespace(by=.5, avg=l.averages.kept.avg*0+1, n=100)
    return learner(cbs=[Averages(), within(change, 6, 12)])
scenarios['helper_in_whose_place_another_is_put'].seen = lambda l: vars(l.averages.kept)

@scenario
def helper_whose_numbers_are_set():
    def change(l, i): l.averages.kept.by,l.averages.kept.n = .1*i,50*i
    return learner(cbs=[Averages(), within(change)])
scenarios['helper_whose_numbers_are_set'].seen = lambda l: vars(l.averages.kept)

@scenario(to=dict(steps_per_execution=4))
def helper_of_several_steps():
    class Looks(Train):
        def before_fit(self): self.all = []
        def after_batch(self): self.all.append((self.averages.kept.avg.clone(), self.averages.kept.n))
    return learner(data=dls(n=8*8), cbs=[Averages(), Looks()])
scenarios['helper_of_several_steps'].seen = lambda l: l.looks.all

@scenario
def averaged_model_of_torch():
    class SWA(Train):
        def before_fit(self): self.swa = torch.optim.swa_utils.AveragedModel(self.model)
        def after_batch(self):
            if self.iter == 4: self.swa.update_parameters(self.model)
    return learner(cbs=SWA())
scenarios['averaged_model_of_torch'].seen = lambda l: [p.detach() for p in l.swa.swa.module.parameters()]

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
def second_torch_adam(): return _second(partial(torch.optim.Adam, lr=.1))
scenarios['second_torch_adam'].seen = lambda l: l.aux.w.detach()

def _accumulates(zero):
    "Two batches to a step, and their loss, which begins anew with `zero`"
    class Accumulates(Train):
        order = 8
        def before_fit(self):
            self.n,self.sums = 0,[]
            self.sum = torch.zeros((), device=self.model[1].weight.device)
        def before_step(self):
            self.n += 1
            if self.n % 2:
                self.sum = self.sum+self.loss.detach()
                raise CancelBatchException()
            self.sums.append(self.sum)
            self.sum = zero(self.loss)
    return learner(cbs=Accumulates(), opt_func=SGD)
@scenario(seen=lambda l: [l.accumulates.sum, *l.accumulates.sums], tol=1e-6)   # a program without an update may be fused otherwise
def accumulates_from_zeros(): return _accumulates(lambda t: torch.zeros((), device=t.device))
@scenario(seen=lambda l: [l.accumulates.sum, *l.accumulates.sums], tol=1e-6)   # a program without an update may be fused otherwise
def accumulates_from_the_like_of_a_loss(): return _accumulates(lambda t: torch.full_like(t.detach(), .5))

@scenario(seen=lambda l: l.keeps.kept)
def numbers_made_in_the_step_and_kept():
    class Keeps(Train):
        def before_fit(self): self.kept = []
        def before_step(self):
            at = self.loss.device
            self.kept += [torch.full((), .1*self.train_iter, device=at), torch.tensor(float(self.train_iter), device=at)]
    return learner(cbs=Keeps())

@scenario
def predicts_in_mid_epoch():
    class Predicts(Train):
        def before_fit(self): self.sums = []
        def after_batch(self):
            if self.iter == 3: self.sums.append(self.learn.get_preds(inner=True, reorder=False)[0].sum())
    return learner(cbs=Predicts())
scenarios['predicts_in_mid_epoch'].seen = lambda l: [*l.predicts.sums, *(v for row in l.recorder.values for v in row)]
