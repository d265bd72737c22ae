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
def lr_as_np_float32(): return sets(lambda i: np.float32(1e-2/(1+i)))
@scenario
def lr_as_a_0_dim_tensor(): return sets(lambda i: torch.tensor(1e-2/(1+i)))
@scenario
def lr_from_float32_array(): return sets(lambda i, l=np.geomspace(1e-2, 1e-3, 20).astype('float32'): l[i])
def torch_opt(f, **kwargs): return partial(OptimWrapper, opt=partial(f, **kwargs))
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
def wd_by_epoch():
    class Sets(Train):
        def before_epoch(self): self.opt.set_hyper('wd', .1*self.epoch)
    return learner(cbs=Sets(), opt_func=partial(SGD, decouple_wd=False))
@scenario
def mom_from_zero():
    class Sets(Train):
        def before_batch(self): self.opt.set_hyper('mom', min(.9, .1*self.train_iter))
    return learner(cbs=Sets(), opt_func=partial(SGD, mom=0.))
scale = 1.
def scaled_step(p, lr, **kwargs): p.data.add_(p.grad.data, alpha=-lr*scale)
@scenario
def own_stepper_reads_a_global():
    import scenarios.optimizers as me
    me.scale = 1.
    return learner(opt_func=lambda ps, lr=1e-2, **k: Optimizer(ps, [scaled_step], lr=lr, mom=.9),
                   cbs=within(lambda l, i: setattr(me, 'scale', .1*i)))

def counted_step(p, lr, n=0, **kwargs):
    p.data.add_(p.grad.data, alpha=-lr/(1+n))
    return dict(n=n+1)
@scenario
def own_stepper_warms_up_by_np_interp():
    return learner(opt_func=lambda ps, lr=1e-2, **k: Optimizer(ps, [counted_interp], lr=lr, mom=.9))
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

def exchange(opt, old, new):
    "As fastai's `_copy_state`"
    opt.param_lists = L(map(L, new))
    for p,q in zip(L(old).concat(), L(new).concat()): opt.state[q] = opt.state.pop(p, {})

@scenario
def master_copies():
    "As fastai's `NonNativeMixedPrecision`: the optimizer steps in copies, of which the model gets the values"
    class Masters(Callback):
        scale = 8.
        def before_fit(self):
            self.own = [list(pg) for pg in self.opt.param_lists]
            self.masters = [[nn.Parameter(p.detach().clone()) for p in pg] for pg in self.own]
            exchange(self.opt, self.own, self.masters)
        def pairs(self): return zip(L(self.own).concat(), L(self.masters).concat())
        def before_backward(self): self.learn.loss_grad = self.loss_grad*self.scale
        def before_step(self):
            for p,q in self.pairs(): q.grad = p.grad.detach()/self.scale
        def after_step(self):
            self.model.zero_grad()
            for p,q in self.pairs(): p.data.copy_(q.data)
        def after_fit(self): exchange(self.opt, self.masters, self.own)
    return learner(cbs=Masters())
