"Losses: numbers of the learner that containers and C code consume, modules and settings that a loss holds"
import contextvars, dataclasses, enum, functools, itertools, math, operator
from collections import ChainMap, defaultdict, deque, namedtuple
from math import cos
from .base import *

class Loss:
    "A loss that knows its learner"
    def __init__(self, f): self.f = f
    def __call__(self, pred, targ): return self.f(self, self.learn, F.cross_entropy(pred, targ))

weights_by_epoch = [1., .5, .25, 2.]
by_epoch = dict(
    a_list=lambda o, learn, l: l*weights_by_epoch[learn.epoch],
    a_tensor=lambda o, learn, l: l*torch.linspace(1, .1, 4)[learn.epoch].item(),
    np_interp=lambda o, learn, l: l*float(np.interp(learn.epoch, [0, 3], [.5, 1.])),
    np_interp_flat=lambda o, learn, l: l*float(np.interp(learn.epoch, [1, 3], [1., .5])),
    math_cos=lambda o, learn, l: l*(1+cos(learn.epoch)),
    math_floor=lambda o, learn, l: l*math.floor(1+learn.epoch/2),
    math_isclose=lambda o, learn, l: l*(.5 if math.isclose(learn.epoch, 2.) else 1.),
    as_float=lambda o, learn, l: l*(1+float(learn.epoch)),
    a_bit=lambda o, learn, l: l*(2. if learn.epoch & 1 else 1.),
    a_range=lambda o, learn, l: l*(1+sum(.1*i for i in range(learn.epoch))),
    a_loop=lambda o, learn, l: functools.reduce(lambda a, _: a*.9, range(learn.epoch), l),
    itemgetter=lambda o, learn, l: l*operator.itemgetter(learn.epoch)(weights_by_epoch),
    minimum=lambda o, learn, l: l*max(.1, 1-.4*learn.epoch),
    ramp_from_one=lambda o, learn, l: l*(1-.2*learn.epoch),
    ramp_from_zero=lambda o, learn, l: l+l*learn.epoch,
    tensor_power=lambda o, learn, l: l**learn.epoch,
    np_float=lambda o, learn, l: l*np.float32(1+learn.epoch),
    dropout_p=lambda o, learn, l: l*F.dropout(torch.ones(4), p=min(.9, .3*learn.epoch), training=False).sum().item(),
    clamp=lambda o, learn, l: l.clamp(max=2-.4*learn.epoch),
    of_hypers=lambda o, learn, l: l*(1+cos(100*learn.opt.hypers[-1]['lr'])) if learn.opt else l)

def _by_epoch(f): return lambda: of_loss(Loss(f))
for _n,_f in by_epoch.items():
    _make = _by_epoch(_f)
    _make.__name__ = f'epoch_{_n}'
    scenario(_make)

# Numbers of the learner's batches

@scenario
def weight_of_each_batch_from_a_list():
    ws = [1+.1*i for i in range(5)]
    return of_loss(Loss(lambda o, learn, l: l*ws[learn.iter % 5]))

@scenario
def weight_from_a_list_by_third_batches():
    return of_loss(Loss(lambda o, learn, l: l*weights_by_epoch[learn.train_iter//7]))

@scenario
def warm_up_by_np_interp_over_batches():
    return of_loss(Loss(lambda o, learn, l: l*float(np.interp(learn.train_iter, [3, 15], [1., .2]))))

# What a loss holds

def changes(f, *epochs):
    "A callback that does `f(learn, epoch)` before some epochs"
    class Changes(Callback):
        def before_epoch(self):
            if self.epoch in (epochs or (1, 2, 3)): f(self.learn, self.epoch)
    return Changes()

def within(f, *batches):
    "A callback that does `f(learn, train_iter)` after some batches"
    class Within(Callback):
        def after_batch(self):
            if self.training and self.train_iter in (batches or (3, 12)): f(self.learn, self.train_iter)
    return Within()

class Holds:
    "A loss with a module in it"
    def __init__(self, ce=None): self.ce = ce or nn.CrossEntropyLoss()
    def __call__(self, pred, targ): return self.ce(pred, targ)

@scenario
def label_smoothing_of_a_held_module():
    return learner(loss_func=Holds(), cbs=within(lambda l, i: setattr(l.loss_func.ce, 'label_smoothing', .02*i)))

@scenario
def gamma_of_a_focal_loss():
    return learner(loss_func=FocalLossFlat(), cbs=within(lambda l, i: setattr(l.loss_func.func, 'gamma', .5*i)))

@scenario
def gamma_of_a_held_focal_loss():
    return learner(loss_func=Holds(FocalLossFlat()), cbs=within(lambda l, i: setattr(l.loss_func.ce.func, 'gamma', .5*i)))

@scenario
def beta_of_smooth_l1():
    class Reg(Holds):
        def __call__(self, pred, targ): return self.ce(pred, F.one_hot(targ, 4).float())
    return learner(loss_func=Reg(nn.SmoothL1Loss()), metrics=[], cbs=within(lambda l, i: setattr(l.loss_func.ce, 'beta', .1*i)))

@scenario
def module_in_a_closure():
    ce = nn.CrossEntropyLoss()
    return learner(loss_func=lambda p, t: ce(p, t), cbs=within(lambda l, i: setattr(ce, 'label_smoothing', .02*i)))

global_ce = nn.CrossEntropyLoss()
@scenario
def module_in_a_global():
    global_ce.label_smoothing = 0.
    return learner(loss_func=lambda p, t: global_ce(p, t), cbs=within(lambda l, i: setattr(global_ce, 'label_smoothing', .02*i)))

@scenario
def module_in_a_partial():
    def loss(pred, targ, ce): return ce(pred, targ)
    ce = nn.CrossEntropyLoss()
    return learner(loss_func=partial(loss, ce=ce), cbs=within(lambda l, i: setattr(ce, 'label_smoothing', .02*i)))

@scenario
def module_in_a_simple_namespace():
    class Several(Holds):
        def __call__(self, pred, targ): return self.ce.first(pred, targ)
    return learner(loss_func=Several(SimpleNamespace(first=nn.CrossEntropyLoss())),
                   cbs=within(lambda l, i: setattr(l.loss_func.ce.first, 'label_smoothing', .02*i)))

@scenario
def module_behind_a_property():
    class Behind(Holds):
        @property
        def fn(self): return self.__dict__['ce']
        def __call__(self, pred, targ): return self.fn(pred, targ)
    return learner(loss_func=Behind(), cbs=within(lambda l, i: setattr(l.loss_func.ce, 'label_smoothing', .02*i)))
