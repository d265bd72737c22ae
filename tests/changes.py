"Stories of what changes between two steps in a model and its optimizer, and replayed training compared with plain training"
import os
os.environ.setdefault('XLA_COMPILATION_CACHE_SIZE', '128')
import tempfile, warnings
from pathlib import Path
from common import *
from scenarios.base import counting
from test_replay_matrix import differences, left_behind
from fastai_xla.all import *
from fastai_xla.seeds import manual_seed
from fastai_xla.transfer import fetch

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
