"""Whatever changes between two steps, replayed training goes on as plain training does, bit for bit

The controls show that each guard is needed."""
import os
os.environ.setdefault('XLA_COMPILATION_CACHE_SIZE', '128')
import gc, tempfile, warnings, weakref
from contextlib import nullcontext
from pathlib import Path

import own_process, pytest
from fastai.callback.all import *
from common import *
from scenarios.base import counting
from test_replay_matrix import differences, left_behind
from fastai_xla.all import *
from fastai_xla.capture import plan, step
from fastai_xla.capture.step import Trace
from fastai_xla.capture.recording import Recording
from fastai_xla.capture.values import Numbers
from fastai_xla.capture.watch import Watch
from fastai_xla.runtime import device, sync
from fastai_xla.seeds import manual_seed
from fastai_xla.transfer import fetch

pytestmark = pytest.mark.usefixtures('recorded')

def net(p=.3):
    return nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()),
                         nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(p), nn.Linear(4, 4)))
def dls(n=40, tfms=None, size=8): return image_dls(n, 16, 8, size=size, after_batch=tfms)   # 5 and 2 batches
def learner(dls_=None, **kwargs):
    return Learner(dls_ or dls(), net(), **(dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy, splitter=params_of) | kwargs))

def run(make, story, replay):
    "What the story leaves behind in its learner, and in what it returns (learners and other things)"
    set_seed(0)
    manual_seed(3)
    learn,counts = make().to_xla(replay=replay),dict(batches=0, replayed=0)
    with learn.no_logging(), learn.no_bar(), warnings.catch_warnings(), counting(counts):
        warnings.simplefilter('ignore')
        more = story(learn) or []
    left = left_behind(learn)
    for i,o in enumerate(more): left |= {f'{i}{k}': v for k,v in left_behind(o).items()} if isinstance(o, Learner) else {f'{i}': fetch(o)}
    return learn,counts,left

def compare(make, story):
    _,n,plain = run(make, story, False)
    assert not n['replayed']
    learn,counts,left = run(make, story, True)
    diff = differences(plain, left)
    assert not diff, f'{len(diff)} of {len(plain)} differ: {diff[:6]} why {dict(learn.xla_opt.replay.reasons.why)} counts {counts}'
    return learn,counts

# A story is what is done with a learner. `between(f)` does `f` between two fits, `during(f)` at some batches of a fit, and fits again

class Does(Callback):
    "Do something to the learner at a batch of the training"
    def __init__(self, f, at=2, when='after_batch'):
        self.f,self.at = f,at
        setattr(self, when, self._do)
    def _do(self):
        if self.training and self.learn.iter == self.at: self.f(self.learn)

def between(*fs, n=1, **kwargs):
    def story(learn):
        learn.fit(n, 1e-2, **kwargs)
        for f in fs:
            f(learn)
            learn.fit(n, 1e-2, **kwargs)
    return story

def during(f, back=None, when='after_batch'):
    cbs = lambda: [Does(f, 1, when), *([Does(back, 3, when)] if back else [])]
    return lambda learn: learn.fit(2, 1e-2, cbs=cbs())

def stories(**fs): return fs

def seq(*fs):
    def f(learn):
        for g in fs: g(learn)
    return f

def setter(get, **kwargs):
    def f(learn):
        for k,v in kwargs.items(): setattr(get(learn), k, v)
    return f

def conv(learn): return learn.model[0][0]
def bn(learn): return learn.model[0][1]
def drop(learn): return learn.model[1][2]
def last(learn): return learn.model[1][3]

# Training flags

def freezes(l): l.freeze()
def unfreezes(l): l.unfreeze()
def bn_eval(l): bn(l).eval()
def bn_train(l): bn(l).train()

flags = stories(freeze=between(freezes, unfreezes), freeze_during=during(freezes, unfreezes),
    freeze_before_batch=during(freezes, unfreezes, 'before_batch'), freeze_within=during(freezes, unfreezes, 'after_step'),
    layer_eval=during(bn_eval, bn_train), layer_eval_before_batch=during(bn_eval, bn_train, 'before_batch'),
    requires_grad=between(lambda l: last(l).bias.requires_grad_(False), lambda l: last(l).bias.requires_grad_(True)),
    requires_grad_during=during(lambda l: conv(l).weight.requires_grad_(False), lambda l: conv(l).weight.requires_grad_(True)))

# Attributes of layers

class Times(nn.Module):
    "Attributes of every kind"
    def __init__(self): 
        super().__init__()
        self.by,self.bys,self.f,self.const,self.table = 1.,[1.,1.],torch.relu,torch.tensor(1.5),dict(a=1.)
    def forward(self, x): return self.f(x*self.by*self.bys[0]*self.table['a'])*self.const.to(x.device)*getattr(self, 'more', 1.)

def times_learner():
    learn = learner()
    learn.model[0].add_module('times', Times())
    return learn
def times(learn): return learn.model[0].times

attrs = stories(dropout_p=between(setter(drop, p=.6), setter(drop, p=.1)), dropout_during=during(setter(drop, p=.6)),
    dropout_off=between(setter(drop, p=0.)), bn_momentum=between(setter(bn, momentum=.3)), bn_eps=during(setter(bn, eps=1e-2)),
    stride=between(setter(conv, stride=(1,1), padding=(0,0))), padding=during(setter(conv, padding=(0,0))),
    submodule=between(lambda l: setattr(l.model[1], '2', nn.Dropout(.6))),
    submodule_during=during(lambda l: setattr(l.model[1], '2', nn.Dropout(.6))),
    appended=between(lambda l: l.model[0].append(nn.Dropout(.6))),
    forward=between(lambda l: setattr(last(l), 'forward', lambda x: F.linear(x, last(l).weight))),
    bn_replaced=between(lambda l: setattr(l.model[0], '1', nn.Identity())))
times_attrs = stories(number=between(setter(times, by=.5)), a_list=between(lambda l: times(l).bys.__setitem__(0, .5)),
    a_dict=between(lambda l: times(l).table.update(a=.5)), function=between(setter(times, f=torch.sigmoid)),
    new_attr=between(setter(times, more=.5)), constant=between(lambda l: setattr(times(l), 'const', torch.tensor(.5))),
    constant_in_place=between(lambda l: times(l).const.mul_(.5)), as_int=between(setter(times, by=2)),
    function_during=during(setter(times, f=torch.sigmoid)), list_during=during(lambda l: setattr(times(l), 'bys', [.5, 1.])))

# Hooks

hooks = []
def hooked(get, kind, f):
    def hook(l): hooks.append(getattr(get(l), kind)(f))
    return hook
def unhook(l): hooks.pop().remove()
def halves_out(m, x, y): return y*.5
def halves_in(m, x): return (x[0]*.5,)
def halves_grads(m, *gs): return tuple(None if g is None else g*.5 for g in gs[0])
def halves(g): return g*.5
def halves_grad(p): p.grad = p.grad*.5
def weight(learn): return last(learn).weight

hook_kinds = dict(forward=hooked(conv, 'register_forward_hook', halves_out), pre=hooked(last, 'register_forward_pre_hook', halves_in),
    backward=hooked(last, 'register_full_backward_hook', halves_grads),
    backward_pre=hooked(last, 'register_full_backward_pre_hook', lambda m,g: (g[0]*.5,)),
    param=hooked(weight, 'register_hook', halves), post=hooked(weight, 'register_post_accumulate_grad_hook', halves_grad))
hook_stories = {f'{n}_{k}': f(hook, unhook) for n,f in dict(between=between, during=during).items() for k,hook in hook_kinds.items()}

# Parameters and buffers

def new_param(l): last(l).weight = nn.Parameter(torch.full_like(fetch(last(l).weight.detach()), .3))
def new_data(l): last(l).weight.data = torch.full((4,4), .3).to(last(l).weight.device)
def doubles(l):
    with torch.no_grad(): last(l).weight.mul_(2)
def copies(l):
    with torch.no_grad(): conv(l).weight.copy_(torch.linspace(-1, 1, 36).view(4,1,3,3))
def resets(l): bn(l).reset_running_stats()
def new_buffer(l): bn(l).running_mean = torch.ones(4, device=bn(l).weight.device)
def ties(l): last(l).bias = bn(l).bias
def new_model(l):
    l.model = net()
    l.opt = None
def grads(l):
    for p in l.model.parameters(): p.grad = torch.ones_like(p)
def loads_state(l): l.model.load_state_dict({k: v*.5 if v.is_floating_point() else v for k,v in fetch(dict(l.model.state_dict())).items()})
def saves(l):
    with tempfile.TemporaryDirectory() as d:
        l.path = Path(d)
        l.save('now')
        l.fit(1, 1e-2)
        l.load('now')
def loads_opt(l):
    sd = fetch(l.opt.state_dict())
    l.fit(1, 1e-2)
    l.opt.load_state_dict(sd)

params = stories(parameter=between(new_param), data=between(new_data, doubles), data_during=during(new_data),
    in_place=during(doubles, copies), in_place_before_batch=during(doubles, copies, 'before_batch'),
    in_place_within=during(doubles, copies, 'after_step'),
    buffer=between(resets, new_buffer), buffer_during=during(resets, new_buffer), tied=between(ties), model=between(new_model, new_model),
    stale_grad=between(grads), stale_grad_during=during(grads), load_state_dict=between(loads_state),
    load_during=during(loads_state), load=between(saves, saves), load_opt=between(loads_opt))

# Optimizer

def new_opt(l): l.create_opt()
def other_opt(f):
    def change(l):
        l.opt_func = f
        l.create_opt()
    return change
def hyper(k, v): return lambda l: l.opt.set_hyper(k, v)
def no_wd(l): l.opt.state[last(l).weight]['do_wd'] = False
def wd_again(l): l.opt.state[last(l).weight]['do_wd'] = True
def clears(l): l.opt.clear_state()
def zeros(l):
    for s in l.opt.state.values():
        if 'grad_avg' in s: s['grad_avg'].zero_()
def resets_opt(l):
    for _ in range(3): l.fit(1, 1e-2, reset_opt=True)
def changes_wd(l):
    for wd in (0, .1, .01, None): l.fit(1, 1e-2, wd=wd)
def groups(l): l.opt.set_hyper('lr', [1e-3, 1e-2])

optims = stories(nothing=between(noop, noop), create=between(*[new_opt]*3), reset=resets_opt,
    other=between(other_opt(SGD), other_opt(partial(SGD, mom=.9)), other_opt(Adam)), wd=changes_wd,
    wd_during=during(hyper('wd', .3), hyper('wd', 0.)), lr_during=during(hyper('lr', .1), groups),
    mom_during=during(hyper('mom', .5)), eps=between(lambda l: l.create_opt() or l.opt.set_hyper('eps', .1)),
    lr_within=during(hyper('lr', .1), hyper('lr', .2), 'after_step'),
    lr_before_batch=during(hyper('lr', .1), hyper('lr', .2), 'before_batch'),
    lr_before_step=during(hyper('lr', .1), hyper('lr', .2), 'before_step'), do_wd=between(no_wd, wd_again, wd=.5),
    do_wd_during=lambda l: l.fit(2, 1e-2, wd=.5, cbs=[Does(no_wd, 1), Does(wd_again, 3)]), clear=between(clears),
    zeros=during(zeros), as_int=lambda l: seq(*[lambda l,lr=lr: l.fit(1, lr) for lr in (1, 1e-2)])(l))

def torch_learner(): return learner(opt_func=partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9))
def maximize(v): return lambda l: l.opt.opt.param_groups[0].update(maximize=v)
def nesterov(v): return lambda l: l.opt.opt.param_groups[0].update(nesterov=v)
torch_optims = stories(maximize=between(maximize(True), maximize(False)), nesterov=during(nesterov(True), nesterov(False)),
                       create=between(new_opt, new_opt), load=between(loads_opt))

def adamw_learner(): return learner(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
def counts_again(l):
    for st in l.opt.opt.state.values(): st['step'].fill_(3)
def counts_one(l): next(iter(l.opt.opt.state.values()))['step'].add_(5)
def reads_count(l): l.seen = [*getattr(l, 'seen', []), next(iter(l.opt.opt.state.values()))['step'].item()]
adamw_optims = stories(create=between(new_opt, new_opt), load=between(loads_opt), reset=resets_opt, wd=changes_wd,
    mom_during=during(hyper('mom', .5), hyper('mom', .8)), betas_during=during(lambda l: l.opt.opt.param_groups[0].update(betas=(.5, .6))),
    count=between(counts_again), count_during=during(counts_again), one_count=during(counts_one), reads=during(reads_count),
    cycle=lambda l: l.fit_one_cycle(2, 1e-2), other=between(other_opt(partial(OptimWrapper, opt=torch.optim.RAdam)), other_opt(Adam)))

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

cases = [(n, k, make, f) for n,make,fs in [('flag', learner, flags), ('attr', learner, attrs), ('attr', times_learner, times_attrs),
    ('hook', learner, hook_stories), ('param', learner, params), ('opt', learner, optims),
    ('torch_opt', torch_learner, torch_optims), ('adamw', adamw_learner, adamw_optims), ('loss', learner, losses),
    ('loss_attr', lambda: learner(loss_func=Weighs()), loss_attrs), ('cb', learner, callbacks), ('cancel', learner, cancels),
    ('data', learner, data), ('tfm', half_learner, tfm_stories), ('around', learner, around), ('two', learner, two),
    ('count', crops_learner, dict(tfm=between())), ('aug', aug_learner, dict(p=between(p_of(0.), p_of(1.))))] for k,f in fs.items()]

# All of them are run by `python tests/test_replay_changes.py [names]`; as tests, those that differ in kind
tested = """flag-freeze flag-freeze_during flag-layer_eval flag-requires_grad_during
    attr-dropout_during attr-bn_momentum attr-stride
    hook-during_forward hook-between_backward hook-during_param
    param-parameter param-data param-in_place_before_batch param-buffer_during param-model param-stale_grad param-load param-load_opt
    opt-nothing opt-reset opt-other opt-lr_within opt-do_wd opt-clear torch_opt-maximize
    adamw-load adamw-one_count adamw-cycle loss-lambdas
    cb-added_during cb-reapplied cb-noise cb-resizes cancel-CancelBatchException_after_pred
    data-ragged data-other_size data-added_tfm
    around-lr_find around-get_preds around-interrupt around-broken around-bf16 around-one_plain
    two-two two-one_model aug-p count-tfm""".split()

def test_names(): assert {*tested} <= {f'{a}-{b}' for a,b,*_ in cases}

@pytest.mark.parametrize('make,story', [c[2:] for c in cases if f'{c[0]}-{c[1]}' in tested],
                         ids=[f'{a}-{b}' for a,b,*_ in cases if f'{a}-{b}' in tested])
def test_change(make, story): compare(make, story)

def weighs(l): l.loss_func.func.weight = torch.tensor([1.,2.,3.,4.]).to(l.pred.device)
def weighs_not(l): l.loss_func.func.weight = None

def test_a_buffer_that_comes_and_goes(without_audits):
    "A buffer that is `None` at first"
    compare(learner, seq(lambda l: l.fit(1, 1e-2), during(weighs, weighs_not)))

# Where the numbers are not the same

def smoothed(losses, counted):
    "Batch -> fastai's smoothed loss after it, worked out from the `losses` of the batches in `counted`"
    res,val = {},0.
    for n,i in enumerate(counted, 1):
        val = .98*val + .02*losses[i].item()
        res[i] = val/(1-.98**n)
    return res

@pytest.mark.parametrize('what', [CancelTrainException, CancelEpochException])
def test_cancelled_before_the_recorder(what):
    "A callback that cancels in `after_batch`, before the recorder: that batch is in no smoothed loss"
    class Losses(Callback):
        order = -5
        def before_fit(self): self.seen = []
        def after_batch(self):
            if self.training: self.seen.append(self.loss)
    def story(l):
        cbs = [Losses(), Cancels(what, 'after_batch')]
        assert all(cb.order < l.recorder.order for cb in cbs)
        l.fit(3, 1e-2, cbs=cbs)
        return [dict(batches=cbs[0].seen)]
    (_,_,plain),(r,counts,replayed) = run(learner, story, False),run(learner, story, True)
    assert counts['replayed'] == counts['batches'] and not r.xla_opt.replay.reasons.why
    assert not differences(plain, replayed)
    seen,recorded = plain['0']['batches'],[0, 1, 3, 4, 6, 7]   # the third batch of each of three epochs is cancelled
    smooth = smoothed(seen, recorded)
    losses = [v for k,v in plain.items() if k.startswith('.losses')]
    for i,l in zip(recorded, losses, strict=True): assert abs(smooth[i]-l) < 1e-5, (i, smooth[i], l)

# Each guard is needed: without it the same story ends otherwise

def one_cycle(l): l.fit_one_cycle(1, 1e-2)
written = []
class Logs(Callback):
    def after_loss(self): written.append(self.learn.iter)
def logs(l):
    written.clear()
    l.fit(2, 1e-2, cbs=Logs())
    return [dict(n=len(written), sum=sum(written))]

_now,_add = Watch.now,Numbers._add
def all_but_lr(self, d, *args, **kwargs): return None if 'lr' in d and 'mom' in d else _add(self, d, *args, **kwargs)
controls = dict(lr=(one_cycle, [(Numbers, '_add', all_but_lr), (Recording, 'verify', noop)]),
    grad=(during(grads), [(Watch, 'now', lambda self: (_now(self)[0], [o for o in _now(self)[1] if not isinstance(o, bool)]))]),
    seed=(one_cycle, [(plan, 'advance_rng', noop)]),
    counter=(counts, [(Trace, '_count', noop)]), log=(logs, [(step, 'no_effects', nullcontext)]))

@pytest.mark.parametrize('name', controls)
def test_control(name, monkeypatch, without_audits):
    story,guards = controls[name]
    make = learner if name != 'lr' else lambda: learner(opt_func=SGD)
    compare(make, story)
    for o,k,f in guards: monkeypatch.setattr(o, k, f)
    with pytest.raises(AssertionError, match='differ'): compare(make, story)

def test_untracked_lr(monkeypatch):
    "With one guard less, the next one finds it: the schedule counts in numpy, which takes the other numbers as they are"
    monkeypatch.setattr(Numbers, '_add', all_but_lr)
    learn,counts = compare(learner, one_cycle)
    assert any('Python numbers decide' in w for w in learn.xla_opt.replay.reasons.why)

# What a recording holds

def n_tensors():
    "XLA tensors that are alive"
    import torch_xla.debug.metrics as met
    gc.collect()
    sync()
    return met.counter_value('CreateXlaTensor') - met.counter_value('DestroyXlaTensor')

def another_callback(l):
    if any(isinstance(cb, Tensors) for cb in l.cbs): l.remove_cb(Tensors)
    l.add_cb(Tensors())
grows = dict(fit=noop, optimizer=new_opt, model=new_model, load=saves, callback=another_callback,
             lr_find=finds, loss=loss(lambda: CrossEntropyLossFlat(weight=torch.ones(4))))

@pytest.mark.parametrize('name', grows)
def test_no_growth(name):
    "What has been replaced is let go, with all recordings of it"
    live = []
    def story(l):
        for _ in range(5):
            grows[name](l)
            l.fit(1, 1e-2)
            live.append(n_tensors())
    run(learner, story, True)
    assert live[-1] == live[-2] == live[-3], live

def test_state_is_freed():
    "The optimizer's state goes with the optimizer"
    def story(l):
        l.fit(1, 1e-2)
        p = last(l).weight
        was = [weakref.ref(l.opt.state[p]['grad_avg']), weakref.ref(l.opt)]
        l.create_opt()
        l.fit(1, 1e-2)
        gc.collect()
        assert not any(w() is not None for w in was)
    run(learner, story, True)

def test_small_cache(tmp_path):
    "A recording whose program torch_xla has dropped is made again"
    code = """
import test_replay_changes as t
from fastai_xla.replay import Replay
Replay.log_of = lambda self: None
make,story = next(c[2:] for c in t.cases if c[:2] == ('cb', 'resizes'))
t.compare(make, story)"""
    res = own_process.run(['-c', code], tmp_path, Path(__file__).parent, os.environ | dict(XLA_COMPILATION_CACHE_SIZE='2'))
    assert not res.returncode, res.stderr[-2000:]

class Averaged(Callback):
    "Validates with an average of the weights, as callbacks do that put another model there for it"
    def before_fit(self): self.mean = deepcopy(self.learn.model)
    def after_train(self):
        with torch.no_grad():
            for a,p in zip(self.mean.parameters(), self.learn.model.parameters()): a.lerp_(p, .5)
    def before_validate(self): self.own,self.learn.model = self.learn.model,self.mean
    def after_validate(self): self.learn.model = self.own

def test_a_model_that_is_there_for_validation_alone_drops_no_recordings():
    def fitted(replay):
        torch.manual_seed(0)
        learn = image_learner(dls=image_dls(shuffle=False), cbs=Averaged()).to_xla(replay=replay)
        with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
        return learn
    right,learn = fitted(False),fitted('auto')
    assert tensor(learn.recorder.losses).equal(tensor(right.recorder.losses)) and learn.recorder.values == right.recorder.values
    report = learn.xla_report()
    assert report.recordings.groupby('phase').recordings.sum().to_dict() == {'training': 1, 'validation': 1}
    assert not report.plain and not report.again and report.audits['training'] == 4   # its batches 2, 4 and 8, and where epochs begin
