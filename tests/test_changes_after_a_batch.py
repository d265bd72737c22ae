"""What a callback changes after a batch, and the next step reads, comes in the order of fastai on the CPU

With several steps as one as with single ones; or the steps run one by one, with a warning"""
import pytest
from collections import deque
from order_of_steps import *
from order_of_steps import _own_state

# --- what a callback changes after a batch, and its own events or hooks of the next step read

class Counts(Callback):
    "A factor of predictions"
    def before_fit(self): self.k,self.handles = 0,self.hooks()
    def hooks(self): return []
    def by(self): return 1-.03*self.k
    def after_batch(self): self.k += self.training
    def after_fit(self): [h.remove() for h in self.handles]
class OwnEvent(Counts):
    def after_pred(self): self.learn.pred = self.pred*self.by()
class SetsBefore(OwnEvent):
    def before_batch(self): self.factor = self.by()
    def after_pred(self): self.learn.pred = self.pred*self.factor
class OfParameters(Counts):
    def hooks(self): return [p.register_hook(lambda g: g*(1-.03*self.k)) for p in self.model.parameters()]
class Forward(Counts):
    def hooks(self): return [self.model[0].register_forward_hook(self.hook)]
    def hook(self, m, x, y): return y*self.by()
class Backward(Counts):
    def hooks(self): return [self.model[1].register_full_backward_hook(lambda m, g, _: (g[0]*(1-.03*self.k),))]
class OfFastai(Forward):
    def hooks(self): return [Hook(self.model[0], self.hook, detach=False)]
    def hook(self, m, x, y): return y*self.by()
class OfStep(Counts):
    "Before torch's"
    def hooks(self): return [self.opt.opt.register_step_pre_hook(self.hook)]
    def hook(self, opt, *args):
        for p in self.model.parameters(): p.grad.mul_(self.by())

class ByObject(Counts):
    def before_fit(self): self.factor,self.handles = Factor(),[]
    def after_pred(self): self.learn.pred = self.pred*self.factor.by()
    def after_batch(self):
        if self.training: self.factor.up()
class ByList(Counts):
    def before_fit(self): self.factors,self.handles = [1.],[]
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad*self.factors[-1]
    def after_batch(self): self.factors.append(1-.03*self.train_iter)
class ReadsAfter(Counts):
    "The other way round"
    def before_fit(self): self.outs,self.handles = [],[]
    def after_pred(self): self.out = self.pred.mean().detach()
    def after_batch(self): self.outs.append(self.out)

class Halves(Callback):
    def after_pred(self): self.learn.pred = self.pred*.5
class TurnsOff(Halves):
    def after_batch(self): self.run = self.train_iter < 4
class TurnsOffTraining(Halves):
    def after_batch(self): self.run_train = self.train_iter%2 == 0
class Leaves(Halves):
    def after_batch(self):
        if self.train_iter == 4: self.learn.remove_cb(self)
class Comes(Callback):
    def after_batch(self):
        if self.train_iter == 4: self.learn.add_cb(Halves())

@pytest.mark.parametrize('cb', [OwnEvent, OfParameters, Forward, Backward, OfFastai, ByObject, ByList, TurnsOff, TurnsOffTraining,
                                Leaves, Comes])
def test_a_callback_counts_for_its_own_events_and_hooks(cb): in_order(lambda: learner(cbs=cb()), _own_state)
def test_a_callback_counts_for_a_hook_of_a_step():
    in_order(lambda: learner(cbs=OfStep(), opt_func=partial(OptimWrapper, opt=torch.optim.SGD)), _own_state)

def test_a_callback_sets_before_a_batch_what_it_counts_after(): in_order(lambda: learner(cbs=SetsBefore()), 'looks at each batch')
def test_a_callback_only_reads_what_a_step_has_left():
    in_order(lambda: learner(cbs=ReadsAfter(), see=lambda l: first(l.cbs, risinstance(Counts)).outs), None)

# --- what a callback changes after a batch, and code that a step reaches in other ways reads

class Factors: k = 0
def factor(): return 1-.03*Factors.k
class CountsThere(Callback):
    def before_fit(self): Factors.k = 0
    def after_batch(self): Factors.k += self.training
class Scaled(nn.Module):
    "By a property, which its `forward` names"
    def __init__(self, held=None): super().__init__(); self.l,self.held = nn.Linear(6, 1),held
    @property
    def scale(self): return 1-.03*Factors.k
    def forward(self, x): return self.l(x)*self.scale
class ScalesByHeld(Scaled):
    def forward(self, x): return self.l(x)*self.held.by()
class CallsHeld(Scaled):
    def forward(self, x): return self.held(self.l(x))
class ByFactors:
    def by(self): return factor()
    def __call__(self, x): return x*factor()
class ReversesGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, g): return -g*factor()
class Reverses(Scaled):
    def forward(self, x): return ReversesGradients.apply(self.l(x))
def stepper(p, lr, **kwargs): p.data.add_(p.grad.data, alpha=-lr*factor())
class Descends(torch.optim.Optimizer):
    def __init__(self, params, lr=.1): super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g['params']: p.add_(p.grad, alpha=-g['lr']*factor())

ways = dict(property=dict(model=Scaled), method=dict(model=partial(ScalesByHeld, ByFactors())),
    object=dict(model=partial(CallsHeld, ByFactors())),
    autograd_function=dict(model=Reverses), stepper=dict(opt_func=partial(Optimizer, cbs=[stepper])),
    optimizer=dict(opt_func=partial(OptimWrapper, opt=Descends)))

@pytest.mark.parametrize('way', ways)
def test_a_callback_counts_for_code_that_a_step_reaches(way): in_order(lambda: learner(cbs=CountsThere(), **ways[way]), _own_state)

class CountsHidden(CountsThere):
    "By what an iterator gives, in which nobody can look"
    def before_fit(self):
        super().before_fit()
        self.fs = iter([super().after_batch]*99)
    def after_batch(self): next(self.fs)()

def test_what_a_step_reads_and_is_changed_too_late_is_told():
    told = left(lambda: learner(cbs=CountsHidden(), model=Scaled), steps_per_execution=3)[1]
    assert len(told) == 1 and 'a callback has changed Factors.k, which the step reads, after a batch, which those' in told[0], told

# --- what a callback changes after a batch, and a step holds under another name

def weighed(p, y, w): return F.mse_loss(p, y)*float(w[-1])
class Weighed:
    def __init__(self, temps): self.temps = temps
    def __call__(self, p, y): return weighed(p, y, self.temps)
class WeighedNet(nn.Module):
    def __init__(self, temps):
        super().__init__()
        self.net,self.temps = nn.Linear(6, 1),temps
    def forward(self, x): return self.net(x)*self.temps[-1]

uses = dict(partial=lambda w: dict(loss_func=partial(weighed, w=w)), object=lambda w: dict(loss_func=Weighed(w)),
            model=lambda w: dict(model=lambda: WeighedNet(w)), closure=lambda w: dict(loss_func=lambda p, y: weighed(p, y, w)))

class Lowers(Callback):
    def __init__(self, own, f): self.own,self.f = own,f
    def after_batch(self):
        if self.training: self.f(self.own)
class Steps(Lowers):
    def after_batch(self):
        if self.training: next(self.own)

def lowers(w): w[0] *= .95
def appends(w): w.append(w[-1]*.95)
def multiplies(w): np.multiply(w, .95, out=w)
def lowering(w):
    while True: yield lowers(w)

kinds = dict(list=(lambda: [1.], lowers), deque=(lambda: deque([1.], 5), appends), array=(lambda: np.ones(1), multiplies),
             generator=(lambda: [1.], lowering))

# how the step holds it and of what kind it is are found apart
@pytest.mark.parametrize('use,kind', [*((use, 'list') for use in uses), ('object', 'deque'), ('model', 'array'), ('closure', 'generator')])
def test_a_callback_changes_what_a_step_holds(use, kind):
    start,f = kinds[kind]
    def make():
        w = start()
        return learner(**uses[use](w), cbs=Steps(f(w), None) if f is lowering else Lowers(w, f))
    in_order(make, 'change what the next one depends on')

class Stops(Callback):
    def __init__(self, e): self.e = e
    def after_batch(self):
        if self.training and self.train_iter == 5: raise self.e('enough')

@pytest.mark.parametrize('e', [KeyboardInterrupt, RuntimeError])
def test_a_callback_ends_the_fit_by_an_exception(e):
    "Steps after it are not done"
    sds = []
    for k in (None, 1, 3):
        for seed in (torch.manual_seed, np.random.seed, random.seed): seed(3)
        learn,_ = learner(cbs=Stops(e))
        if k: learn.to_xla(steps_per_execution=k)
        with learn.no_bar(), learn.no_logging(), pytest.raises(e), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            learn.fit(1, 1e-2)
        sds.append(list(host(learn.model.state_dict()).values()))
    for a,b,c in zip(*sds): torch.testing.assert_close(c, b), torch.testing.assert_close(c, a, rtol=1e-3, atol=1e-4)

def test_a_list_that_only_callbacks_hold_does_not_ask_for_single_steps():
    def make():
        seen = []
        return learner(cbs=[Lowers(seen, lambda w: w.append(1)), Sees(lambda: len(seen))], see=lambda l: l.sees.seen)
    in_order(make, None, cpu=False)

# --- methods of a learner of the user's

class DoesMore(Learner):
    n = 0
    def _do_one_batch(self):
        self.n += 1
        super()._do_one_batch()
        if self.training and self.n%3 == 0:
            with torch.no_grad():
                for p in self.model.parameters(): p.mul_(1-.001*self.n)
class SplitsOtherwise(Learner):
    n = 0
    def _split(self, b):
        super()._split(b)
        self.n += 1
        self.xb = self.xb[0]*(1+.01*self.n),

@pytest.mark.parametrize('cls', [DoesMore, SplitsOtherwise])
def test_a_learner_of_the_users_does_its_batches(cls):
    def make():
        m = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        return cls(data(), m, loss_func=F.mse_loss),lambda learn: [learn.n]
    in_order(make, "runs in the place of fastai's")
