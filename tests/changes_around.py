"Stories of what changes between two steps in losses, callbacks and data, and around a fit"
import gc
import pytest
from common import *
from fastai_xla.all import *
from fastai_xla.runtime import device
from fastai_xla.seeds import manual_seed
from changes import *

# Losses

def halved(pred, y): return F.cross_entropy(pred, y)*.5
class Weighs:
    "A loss that is no module"
    def __init__(self, w=1., f=F.cross_entropy): self.w,self.f,self.ws = w,f,[1.]
    def __call__(self, pred, y): return self.f(pred, y)*self.w*self.ws[0]
def nll(pred, y): return F.nll_loss(pred.sigmoid(), y)
def loss(f):
    def change(l): l.loss_func = f()
    return change
def in_place_of(place, make):
    "An object with the `id` of a dead one, if that is to be had"
    gc.collect()
    made = []
    while len(made) < 20000:
        made.append(make())
        if id(made[-1]) == place: break
    return made[-1]
def lambdas(l):
    "Made one after the other, each in the place of the one before it"
    place = None
    for k in range(4):
        l.loss_func = in_place_of(place, eval(f'lambda: lambda pred, y: F.cross_entropy(pred, y)*{.5+k}'))
        l.fit(1, 1e-2)
        place,l.loss_func = id(l.loss_func),None
def partials(l):
    for k in range(4):
        l.loss_func = partial(F.cross_entropy, label_smoothing=.1*k)
        l.fit(1, 1e-2)
def loss_within(l): l.loss_func = halved

losses = stories(function=between(loss(lambda: halved)), during=during(loss_within), lambdas=lambdas, partials=partials,
    flat=between(loss(FocalLossFlat), loss(lambda: LabelSmoothingCrossEntropyFlat(eps=.3)),
                 loss(lambda: CrossEntropyLossFlat(weight=torch.tensor([1.,2.,3.,4.])))),
    module_weight=between(loss(lambda: CrossEntropyLossFlat(weight=torch.tensor([1.,2.,3.,4.]))),
                          lambda l: setattr(l.loss_func.func, 'weight', torch.ones(4).to(device()))),
    eps=between(loss(lambda: LabelSmoothingCrossEntropyFlat(eps=.3)), lambda l: setattr(l.loss_func.func, 'eps', .1)))
loss_attrs = stories(number=between(lambda l: setattr(l.loss_func, 'w', .5)), number_during=during(lambda l: setattr(l.loss_func, 'w', .5)),
                     function=between(lambda l: setattr(l.loss_func, 'f', nll)),
                     a_list=between(lambda l: l.loss_func.ws.__setitem__(0, .5)), as_int=between(lambda l: setattr(l.loss_func, 'w', 2)))

# Callbacks

class Scales(Callback):
    "Touches tensors only"
    def __init__(self, by=.5): self.by = by
    def after_loss(self): self.learn.loss_grad = self.loss_grad*self.by
class Applies(Callback):
    def __init__(self, f=torch.sigmoid, bys=(1.,), opts=None): self.f,self.bys,self.opts = f,list(bys),opts or dict(by=1.)
    def after_pred(self): self.learn.pred = self.f(self.pred)*self.bys[0]*self.opts['by']
class Counts(Callback):
    def __init__(self): self.n = self.m = 0
    def after_batch(self): self.n += 1
    def after_loss(self): self.m += 1
class ByEpoch(Callback):
    "Python numbers of the learner decide"
    def after_loss(self):
        if self.learn.epoch > 0: self.learn.loss_grad = self.loss_grad*.5
        if self.learn.pct_train > .7: self.learn.loss_grad = self.loss_grad*3
class ByIter(Callback):
    def before_step(self):
        for p in self.model.parameters(): p.grad.mul_(1. if self.learn.iter % 2 else .5)
class Noise(Callback):
    "Sets the batch on the device"
    def before_batch(self): self.learn.xb = (self.xb[0] + torch.randn_like(self.xb[0])*.1,)
class Doubled(Callback):
    def before_batch(self): self.learn.xb = (torch.cat([self.xb[0], -self.xb[0]]),); self.learn.yb = (torch.cat([self.yb[0]]*2),)
class Resizes(Callback):
    "Two shapes in turns"
    def before_batch(self): self.learn.xb = (F.interpolate(self.xb[0], size=8+2*(self.learn.iter%2)),)
class Anneals(Callback):
    def after_batch(self):
        if self.training: self.opt.set_hyper('lr', self.opt.hypers[-1]['lr']*.9); self.opt.set_hyper('wd', self.opt.hypers[-1]['wd']+.01)
class Cancels(Callback):
    def __init__(self, what, when, every=3):
        self.what,self.every = what,every
        setattr(self, when, self._do)
    def _do(self):
        if self.training and self.learn.iter % self.every == 2: raise self.what('broken')
class Tensors(Callback):
    "State of its own, on the device"
    def before_fit(self): self.avg,self.seen = None,[]
    def after_loss(self):
        if not self.training: return
        l = self.loss.detach()
        self.avg = l if self.avg is None else self.avg*.9 + l*.1
        self.learn.loss_grad = self.loss_grad/(self.avg+1)
def added(make): return lambda l: l.add_cb(make())
def removed(cls): return lambda l: l.remove_cb(next(cb for cb in l.cbs if isinstance(cb, cls)))
def renewed(l):
    "Callbacks of one class, one after the other"
    for k in range(5):
        l.add_cb(Scales(.1+k))
        l.fit(1, 1e-2)
        l.remove_cb(Scales)
        gc.collect()
def reapplied(l):
    place = None
    for f in (torch.sigmoid, torch.tanh, torch.relu):
        l.add_cb(in_place_of(place, lambda: Applies(f)))
        place = id(l.cbs[-1])
        l.fit(1, 1e-2)
        l.remove_cb(Applies)
def counts(l):
    cb = Counts()
    l.fit(2, 1e-2, cbs=cb)
    return [dict(n=cb.n, m=cb.m)]
def of(cls, f): return lambda l: f(next(cb for cb in l.cbs if isinstance(cb, cls)))
def cb_between(cb, f): return lambda l: (l.add_cb(cb()), between(of(type(l.cbs[-1]), f))(l))[1]
def cb_during(cb, f): return lambda l: (l.add_cb(cb()), during(of(type(l.cbs[-1]), f))(l))[1]
def with_cbs(*cbs): return lambda l: l.fit(2, 1e-2, cbs=[cb() for cb in cbs])

callbacks = stories(added=between(added(Scales), removed(Scales)), added_during=during(added(Scales), removed(Scales)), renewed=renewed,
    reapplied=reapplied, counts=counts, by_epoch=with_cbs(ByEpoch), by_iter=with_cbs(ByIter),
    noise=with_cbs(Noise), doubled=with_cbs(Doubled), resizes=with_cbs(Resizes),
    anneals=with_cbs(Anneals), tensors=with_cbs(Tensors), number=cb_between(Scales, lambda cb: setattr(cb, 'by', 2.)),
    number_during=cb_during(Scales, lambda cb: setattr(cb, 'by', 2.)),
    function=cb_between(Applies, lambda cb: setattr(cb, 'f', torch.tanh)), a_list=cb_between(Applies, lambda cb: cb.bys.__setitem__(0, 3.)),
    a_dict=cb_between(Applies, lambda cb: cb.opts.update(by=3.)),
    function_during=cb_during(Applies, lambda cb: setattr(cb, 'f', torch.tanh)), as_int=cb_between(Scales, lambda cb: setattr(cb, 'by', 2)),
    new_method=cb_between(Scales, lambda cb: setattr(cb, 'after_pred', lambda: setattr(cb.learn, 'pred', cb.learn.pred*2))),
    runs_not=cb_between(Scales, lambda cb: setattr(cb, 'run', False)),
    clip=cb_between(partial(GradientClip, .1), lambda cb: setattr(cb, 'max_norm', 1e-3)),
    mixup=cb_between(MixUp, lambda cb: setattr(cb, 'distrib', torch.distributions.Beta(torch.tensor(9.), torch.tensor(9.)))),
    label_smoothing=between(added(MixUp), removed(MixUp)),
    no_grad=between(lambda l: l.add_cb(Does(lambda l: torch.set_grad_enabled(True), 1))))
cancels = {f'{w.__name__}_{e}': with_cbs(partial(Cancels, w, e))
           for w,e in [(CancelBatchException, 'before_batch'), (CancelBatchException, 'after_pred'), (CancelBatchException, 'after_loss'),
                       (CancelStepException, 'before_step'), (CancelBackwardException, 'before_backward'),
                       (CancelTrainException, 'after_loss'), (CancelFitException, 'after_step')]}

# Data

class Crops(Transform):
    "Counts batches"
    def __init__(self): self.n = 0
    def encodes(self, x:TensorImageBW):
        self.n += 1
        return x*(1. if self.n % 2 else .5)
class Half(Transform):
    def __init__(self, by=.5): self.by = by
    def encodes(self, x:TensorImageBW): return x*self.by
class Negative(Transform):
    def encodes(self, x:TensorImageBW): return -x
def tfms(l): return l.dls.train.after_batch.fs
def other_data(n, size=8, **kwargs):
    def change(l): l.dls = dls(n, size=size, **kwargs); l.dls.to(device())
    return change
def adds_tfm(l): l.dls.train.after_batch.add(Half())
def other_tfm(l): l.dls.train.after_batch = Pipeline([Negative()])
def bigger(l): l.dls.train = l.dls.train.new(bs=10)

data = stories(ragged=between(other_data(44)), other_size=between(other_data(40, 10), other_data(40, 8)),
               other_tfms=between(other_data(40, tfms=[Half()]), other_data(40)), added_tfm=between(adds_tfm),
               replaced_tfm=between(other_tfm), bs=between(lambda l: setattr(l.dls.train, 'bs', 10)))
tfm_stories = stories(number=between(lambda l: setattr(tfms(l)[0], 'by', 2.)), removed=between(lambda l: tfms(l).clear()),
                      number_during=during(lambda l: setattr(tfms(l)[0], 'by', 2.)),
                      added=between(adds_tfm), as_int=between(lambda l: setattr(tfms(l)[0], 'by', 2)))
def half_learner(): return learner(dls(tfms=[Half()]))
def crops_learner(): return learner(dls(tfms=[Crops()]))
def aug_learner(): return learner(dls(tfms=aug_transforms(size=8)))
def p_of(p): return lambda l: [setattr(f, 'p', p) for f in tfms(l) if hasattr(f, 'p')]

# Around the fit

def finds(l): l.lr_find(num_it=7, show_plot=False)
def validates(l): return l.validate()
def predicts(l): return l.get_preds()
def interrupts(l):
    with pytest.raises(KeyboardInterrupt): l.fit(1, 1e-2, cbs=Cancels(KeyboardInterrupt, 'after_batch'))
def broken_within(what):
    def breaks(l):
        with pytest.raises(what): l.fit(1, 1e-2, cbs=Cancels(what, 'after_pred'))
    return breaks
def broken_transform(l):
    class Breaks(Transform):
        order = 99
        def encodes(self, x:TensorImageBW): raise ValueError('broken')
    l.dls.train.after_batch.add(Breaks())
    with pytest.raises(ValueError): l.fit(1, 1e-2)
    l.dls.train.after_batch.fs.pop()
def to_bf16(l): l.to_bf16()
def to_fp32(l): l.to_fp32()
def away(l): replay = bool(l.xla_opt.replay); l.detach_xla(); l.to_xla(replay=replay)
def one_plain(l):
    replay = l.xla_opt.replay is not None
    l.to_xla(replay=False).fit(1, 1e-2)
    l.to_xla(replay=replay)
def metrics(l): l.metrics = L(error_rate, accuracy).map(mk_metric)
def train_metrics(l): l.recorder.train_metrics = not l.recorder.train_metrics
def by_hand(l):
    "fastai's own pieces"
    l.opt.hypers
    b = l.dls.train.one_batch()
    l.model.train()
    l.loss_func(l.model(b[0]), b[1]).backward()
    l.opt.step()
    l.opt.zero_grad()
def predicts_within(l):
    l.fit(2, 1e-2, cbs=Does(lambda l: l.model.eval() and l.model(torch.ones(1, 1, 8, 8, device=device())) is None or l.model.train()))
def seeds(l): manual_seed(7)

around = stories(lr_find=between(finds, finds), validate=between(validates, validates), get_preds=between(predicts, predicts),
    interrupt=between(interrupts, interrupts), broken=between(broken_within(ValueError), broken_within(KeyError)),
    broken_transform=between(broken_transform),
    bf16=between(to_bf16, to_fp32, to_bf16), away=between(away, away), one_plain=between(one_plain),
    metrics=between(metrics, lambda l: setattr(l, 'metrics', L())), train_metrics=between(train_metrics, train_metrics),
    by_hand=between(by_hand, by_hand), within=predicts_within, seed=between(seeds, seeds))

# Two learners

def turns(other):
    def story(l):
        o = other(l).to_xla(replay=bool(l.xla_opt.replay))
        with o.no_logging(), o.no_bar():
            for _ in range(2):
                l.fit(1, 1e-2)
                o.fit(1, 1e-2)
        return [o]
    return story
def shared_opt(l):
    o = Learner(dls(), l.model, loss_func=F.cross_entropy, splitter=params_of, metrics=accuracy)
    l.create_opt()
    o.opt = l.opt
    return o
two = stories(two=turns(lambda l: learner()),
              one_model=turns(lambda l: Learner(dls(), l.model, loss_func=F.cross_entropy, splitter=params_of, metrics=accuracy)),
              one_opt=turns(shared_opt), one_dls=turns(lambda l: learner(l.dls)))
