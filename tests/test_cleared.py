"Parameters that have a gradient at some steps alone, where steps are recorded by guards: the optimizer passes over them as on the CPU"
import pytest
from fastai.vision.all import *
from fastai_xla.all import *
from on_both import agree, compare, fits, learner, told

class Two(Module):
    "A head `b` that learns where it is on"
    def __init__(self): self.a,self.b,self.on = *(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)) for _ in range(2)),False
    def forward(self, x): return self.a(x) + (self.b(x) if self.on else self.b(x).detach())

class On(Callback):
    def __init__(self, steps): self.steps = steps
    def before_batch(self): self.model.on = self.training and self.train_iter in self.steps

class Turns(Callback):
    "Of three batches one is for `b`"
    def before_fit(self): self.n = 0
    def after_step(self):
        self.n = (self.n+1)%self.model.of
        self.model.on = self.n == self.model.of-1

def steps(learn): return [learn.opt.state[p].get('step', 0) for p in learn.model.parameters()]
def story(learn): return fits(learn, 3),steps(learn)
def two(cb, opt, of=3):
    learn = learner(cbs=cb, opt_func=opt, wd=1.)
    learn.model = Two()
    learn.model.of = of
    return learn

sgd = partial(SGD, mom=.9)
adamw = partial(OptimWrapper, opt=torch.optim.AdamW)

@pytest.mark.parametrize('at,opt', [((7,), Adam), ((7,), sgd), ((7,), adamw), ((6, 7), sgd), ((1, 3, 8), sgd)])
def test_a_gradient_that_came_once_is_zeros_from_then_on(at, opt, recorded, without_audits):
    "Before that there is none. Both steps look alike"
    learn = compare(lambda: two(On(at), opt), fits if opt is adamw else story, replays=('auto',))
    assert not learn.xla_report().plain

@pytest.mark.parametrize('of,steps_per_execution', [(2, 2), (3, 3), (2, 3)])
def test_a_trace_of_several_steps_leaves_no_note(of, steps_per_execution):
    "A flag that is back after them is seen to change where they are traced one by one"
    make = lambda: two(Turns(), Adam, of)
    (_,there),(_,here) = told(make, story),told(make, story, True, steps_per_execution=steps_per_execution)
    other = [k for k in there if not agree(there[k], here[k], 1e-4)]
    assert not other, [(k, there[k], here[k]) for k in other[:4]]
