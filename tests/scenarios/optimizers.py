"Optimizers, hyper-parameters and schedules by hand"
from fastai.callback.all import *
from fastai.optimizer import Optimizer, sgd_step, weight_decay, Lookahead
from .base import *
from .losses import within
from .callbacks import Train

def sets(f, opt_func=SGD, **kwargs):
    "A learner with a callback that gives the learning rate of each batch"
    class Sets(Train):
        def before_batch(self): self.opt.hypers[-1]['lr'] = f(self.train_iter)
    return learner(cbs=Sets(), opt_func=opt_func, **kwargs)

@scenario
def lr_by_hand(): return sets(lambda i: 1e-2/(1+i))
@scenario
def lr_as_np_float32(): return sets(lambda i: np.float32(1e-2/(1+i)))
@scenario
def lr_as_np_float64(): return sets(lambda i: np.float64(1e-2/(1+i)))
@scenario
def lr_as_np_float32_of_adam(): return sets(lambda i: np.float32(1e-2/(1+i)), opt_func=Adam)
@scenario
def lr_as_a_0_dim_tensor(): return sets(lambda i: torch.tensor(1e-2/(1+i)))
@scenario
def lr_as_a_0_dim_array(): return sets(lambda i: np.array(1e-2/(1+i)))
@scenario
def lr_from_np_linspace(): return sets(lambda i, l=np.linspace(1e-2, 1e-3, 20): l[i])
@scenario
def lr_from_float32_array(): return sets(lambda i, l=np.geomspace(1e-2, 1e-3, 20).astype('float32'): l[i])
@scenario
def lr_as_int(): return sets(lambda i: 1 if i == 7 else 1e-2)
@scenario
def lr_as_slice_of_groups():
    return learner(splitter=lambda m: [list(m[1].parameters()), list(m[3].parameters())])
scenarios['lr_as_slice_of_groups'].fit = lambda l: l.fit(4, slice(1e-3, 1e-2))

def torch_opt(f, **kwargs): return partial(OptimWrapper, opt=partial(f, **kwargs))
@scenario
def torch_lr_by_hand():
    class Sets(Train):
        def before_batch(self): self.opt.opt.param_groups[0]['lr'] = 1e-2/(1+self.train_iter)
    return learner(cbs=Sets(), opt_func=torch_opt(torch.optim.SGD, momentum=.9))
@scenario
def torch_lr_as_np_float32():
    class Sets(Train):
        def before_batch(self): self.opt.opt.param_groups[0]['lr'] = np.float32(1e-2/(1+self.train_iter))
    return learner(cbs=Sets(), opt_func=torch_opt(torch.optim.SGD, momentum=.9))
@scenario
def torch_lr_as_a_0_dim_tensor():
    class Sets(Train):
        def before_batch(self): self.opt.opt.param_groups[0]['lr'] = torch.tensor(1e-2/(1+self.train_iter))
    return learner(cbs=Sets(), opt_func=torch_opt(torch.optim.SGD, momentum=.9, foreach=False))
@scenario
def torch_betas_changed():
    class Sets(Train):
        def before_epoch(self): self.opt.opt.param_groups[0]['betas'] = (.9-.1*self.epoch, .99)
    return learner(cbs=Sets(), opt_func=torch_opt(torch.optim.AdamW))
@scenario
def torch_scheduler():
    class Sched(Train):
        def before_fit(self): self.s = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt.opt, T_max=20)
        def after_batch(self): self.s.step()
    return learner(cbs=Sched(), opt_func=torch_opt(torch.optim.SGD, momentum=.9))
@scenario
def torch_adam(): return learner(opt_func=torch_opt(torch.optim.Adam))
@scenario
def wd_by_epoch():
    class Sets(Train):
        def before_epoch(self): self.opt.set_hyper('wd', .1*self.epoch)
    return learner(cbs=Sets(), opt_func=partial(SGD, decouple_wd=False))
@scenario
def mom_from_zero():
    class Sets(Train):
        def before_batch(self): self.opt.set_hyper('mom', min(.9, .1*self.train_iter))
    return learner(cbs=Sets(), opt_func=partial(SGD, mom=0.))
@scenario
def lookahead(): return learner(opt_func=lambda ps, lr=1e-2, **k: Lookahead(SGD(ps, lr=lr, **k), k=3))

scale = 1.
def scaled_step(p, lr, **kwargs): p.data.add_(p.grad.data, alpha=-lr*scale)
@scenario
def own_stepper_reads_a_global():
    import scenarios.optimizers as me
    me.scale = 1.
    return learner(opt_func=lambda ps, lr=1e-2, **k: Optimizer(ps, [scaled_step], lr=lr, mom=.9), cbs=within(lambda l, i: setattr(me, 'scale', .1*i)))

def counted_step(p, lr, n=0, **kwargs):
    p.data.add_(p.grad.data, alpha=-lr/(1+n))
    return dict(n=n+1)
@scenario
def own_stepper_counts(): return learner(opt_func=lambda ps, lr=1e-2, **k: Optimizer(ps, [counted_step], lr=lr, mom=.9))

def warm(n=0, **kwargs): return dict(n=n+1)
def warm_step(p, lr, n, **kwargs): p.data.add_(p.grad.data, alpha=-lr*float(np.interp(n, [0, 10], [.1, 1.])))
@scenario
def own_stepper_warms_up_by_np_interp():
    return learner(opt_func=lambda ps, lr=1e-2, **k: Optimizer(ps, [warm_step], cbs=[], lr=lr, mom=.9) if False else Optimizer(ps, [warm, warm_step] if False else [counted_interp], lr=lr, mom=.9))
def counted_interp(p, lr, n=0, **kwargs):
    p.data.add_(p.grad.data, alpha=-lr*float(np.interp(n, [0, 10], [.1, 1.])))
    return dict(n=n+1)

def listed_step(p, lr, n=0, **kwargs):
    p.data.add_(p.grad.data, alpha=-lr*[1., .5, .25, .1, .01][n//5])
    return dict(n=n+1)
@scenario
def own_stepper_reads_a_list(): return learner(opt_func=lambda ps, lr=1e-2, **k: Optimizer(ps, [listed_step], lr=lr, mom=.9))

@scenario
def parameters_swapped_around_validation():
    class Swap(Callback):
        def before_fit(self): self.avg = [p.detach().clone() for p in self.model.parameters()]
        def after_batch(self):
            if not self.training: return
            with torch.no_grad():
                for a,p in zip(self.avg, self.model.parameters()): a.lerp_(p, .2)
        def _swap(self):
            with torch.no_grad():
                for a,p in zip(self.avg, self.model.parameters()):
                    t = p.clone()
                    p.copy_(a)
                    a.copy_(t)
        def before_validate(self): self._swap()
        def after_validate(self): self._swap()
    return learner(cbs=Swap())

@scenario
def parameters_swapped_by_data():
    class Swap(Callback):
        def before_fit(self): self.avg = [p.detach().clone() for p in self.model.parameters()]
        def _swap(self):
            for i,p in enumerate(self.model.parameters()): p.data,self.avg[i] = self.avg[i],p.data
        def before_validate(self): self._swap()
        def after_validate(self): self._swap()
    return learner(cbs=Swap())

@scenario
def one_cycle(): return learner(opt_func=Adam)
scenarios['one_cycle'].fit = lambda l: l.fit_one_cycle(4, 1e-2)
@scenario
def flat_cos(): return learner(opt_func=ranger)
scenarios['flat_cos'].fit = lambda l: l.fit_flat_cos(4, 1e-2)
@scenario
def freezes_between_fits(): return learner(splitter=lambda m: [list(m[1].parameters()), list(m[3].parameters())])
def _fine_tunes(l):
    l.freeze(); l.fit(2, 1e-2); l.unfreeze(); l.fit(2, slice(1e-3, 1e-2))
scenarios['freezes_between_fits'].fit = _fine_tunes
@scenario
def to_bf16(): return learner().to_bf16()
scenarios['to_bf16'].cpu = False
