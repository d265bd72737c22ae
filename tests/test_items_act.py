"Making an item changes what a step looks at: batches are read in turn, as fastai reads them"
from order_of_steps import *
from fastai_xla.makers import items_act, makers_of

class Setting: w = 1.
class Sets(Items):
    "A weight in the loss"
    def __getitem__(self, i):
        if i%16 == 0: Setting.w = 1+i/100
        return super().__getitem__(i)
class Calls(Items):
    "A function that it is given later"
    def __getitem__(self, i):
        if i%16 == 0 and hasattr(self, 'f'): self.f(i)
        return super().__getitem__(i)

def setting(cls=Sets):
    Setting.w,xy = 1.,items()
    return DataLoaders.from_dsets(cls(xy[:160]), cls(xy[160:]), bs=16, num_workers=0)

def of_loss(): return learner(setting, loss_func=lambda p, y: F.mse_loss(p, y)*Setting.w)
def of_opt():
    learn,see = learner(partial(setting, Calls))
    learn.dls.train_ds.f = lambda i: learn.opt and learn.opt.set_hyper('lr', 1e-3*(i+1))
    return learn,see
def of_module():
    learn,see = learner(partial(setting, Calls), model=lambda: nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(.1), nn.Linear(8, 1)))
    def f(i): learn.model[1].negative_slope = i/200
    learn.dls.train_ds.f = f
    return learn,see

default,three,retraced = dict(replay='auto'),dict(steps_per_execution=3),dict(replay=False)

@pytest.mark.parametrize('make', [of_loss, of_opt, of_module])
def test_an_item_changes_what_a_step_looks_at(make):
    want,_ = left(make)
    for to in (default, three, *[retraced]*(make is of_loss)):
        got,told = left(make, **to)
        for a,b in zip(*map(leaves, (want, got)), strict=True):
            torch.testing.assert_close(*map(torch.as_tensor, (b, a)), rtol=1e-3, atol=1e-4, check_dtype=False)
        assert len(told) == (to is three) and all('making the items of its DataLoader' in s for s in told), (to, told)

class Counts(Items):
    n = 0
    def __getitem__(self, i): self.n += 1; return super().__getitem__(i)
class Loads(Items):
    "Under a name that a learner has as well"
    def load(self, i): return super().__getitem__(i)
    def __getitem__(self, i): return self.load(i)

@pytest.mark.parametrize('cls', [Counts, Loads])
def test_an_item_that_changes_nothing_else_is_read_ahead(cls):
    learn = learner(partial(setting, cls))[0].to_xla()
    learn.dl = learn.dls.train
    assert not items_act(learn, makers_of(learn.dl))
