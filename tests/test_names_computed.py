"With several steps as one: callbacks that find what they change under names they compute, or by references, and functions of schedules"
import math, weakref
from order_of_steps import *
from fastai.callback.schedule import ParamScheduler
from order_of_steps import _own_state

class Weights(Callback):
    def after_batch(self):
        if self.training: self.lower(getattr(self.learn, f'mo{"del"}'))
    def lower(self, m):
        for p in m.parameters(): p.data.mul_(.97)
class FirstWeight(Weights):
    def after_batch(self):
        if self.training: vars(self.learn)['mo'+'del'][0].weight.data.mul_(.97)

class Own(Callback):
    "A number of its own"
    name = 'k'
    def before_fit(self): self.k = 0
    def after_pred(self): self.learn.pred = self.pred*(1-.03*self.k)
    def after_batch(self): setattr(self, self.name, self.train_iter)
class InDict(Own):
    def after_batch(self): self.__dict__[self.name] = self.train_iter
class ByUpdate(Own):
    def after_batch(self): vars(self).update({self.name: self.train_iter})
class OfObject(Own):
    def after_batch(self):
        for n in ('k',): object.__setattr__(self, n, self.train_iter)
class Executes(Own):
    def after_batch(self): exec('self.k = self.train_iter')
class ByMethod(Own):
    def up(self): self.k = self.train_iter
    def after_batch(self): getattr(self, 'up')()

class OfHelper(Own):
    "Of an object that holds the number, behind a weak reference"
    def before_fit(self): self.k = 0; self.helper = weakref.ref(factor)
    def after_pred(self): self.learn.pred = self.pred*factor.by()
    def after_batch(self):
        if self.training: self.helper().up()
class ByMap(OfHelper):
    def before_fit(self): self.todo = map(lambda _: factor.up(), range(999))
    def after_batch(self):
        if self.training: next(self.todo)

factor = Factor()
own = [Weights, FirstWeight, Own, InDict, ByUpdate, OfObject, Executes, ByMethod, OfHelper, ByMap]

@pytest.mark.parametrize('cb', own)
def test_a_callback_computes_the_name_of_what_it_changes(cb):
    def make():
        factor.n = 0
        return learner(cbs=cb())
    in_order(make, _own_state)

class Reads(Callback):
    def before_fit(self): self.seen = []
    def after_batch(self): self.seen.append(float(getattr(self.learn, 'loss', 0)))

def test_a_callback_says_the_name_of_what_it_reads(): in_order(lambda: learner(cbs=Reads(), see=lambda l: l.reads.seen), None)

# --- functions of the user's in a schedule, which are asked before the steps of a program

def cos(pos): return .005*(1+math.cos(math.pi*pos))
plain = dict(function=cos, partial=partial(lambda pos, k: .01+k*pos, k=.001),
             combined=combine_scheds([.5, .5], [SchedLin(1e-3, 1e-2), cos]))

@pytest.mark.parametrize('name', plain)
def test_a_schedule_answers_with_a_number(name): in_order(lambda: learner(cbs=ParamScheduler({'lr': plain[name]})), None)

def counts(pos): factor.n += 1; return 1e-2
class Scales(nn.Module):
    def __init__(self): super().__init__(); self.l = nn.Linear(6, 1)
    def forward(self, x): return self.l(x)*factor.by()
weight = [1.]
def lowers_weight(pos): weight[0] *= .97; return 1e-2
class Marks(Callback):
    def after_batch(self): factor.n = self.train_iter

def of_loss():
    learn,see = learner()
    learn.add_cb(ParamScheduler({'lr': lambda pos: 2e-3*float(learn.loss) if hasattr(learn, 'loss') else 1e-3}))
    return learn,see

more = dict(sets=lambda: learner(model=Scales, cbs=ParamScheduler({'lr': counts})),
    item=lambda: learner(loss_func=lambda p, y: F.mse_loss(p, y)*weight[0], cbs=ParamScheduler({'lr': lowers_weight})),
    reads=lambda: learner(cbs=[Marks(), ParamScheduler({'lr': lambda pos: 1e-3 if factor.n > 3 else 1e-2})]),
    loss=of_loss,
    draws=lambda: learner(partial(loaders, random.random), cbs=ParamScheduler({'lr': lambda pos: 1e-2*random.random()})))

@pytest.mark.parametrize('name', more)
def test_a_schedule_reads_or_changes_what_steps_do(name):
    def make():
        factor.n,weight[0] = 0,1.
        return more[name]()
    in_order(make, 'draw random numbers' if name == 'draws' else _own_state)
