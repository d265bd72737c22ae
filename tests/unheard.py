"A small regression, and a fit of it that is compared with that of fastai on the CPU: losses, weights and what was seen"
import warnings
from fastai.vision.all import *
from fastai_xla.all import *

class Items:
    def __init__(self, xs, ys): self.xs,self.ys = xs,ys
    def __len__(self): return len(self.xs)
    def __getitem__(self, i): return self.xs[i].clone(),self.ys[i].clone()

def numbers(n=40, d=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    return x,(x[:,:2].prod(1)+x[:,2].sin())[:,None]

def data(train=None, valid=None):
    return DataLoaders.from_dsets(train or Items(*numbers()), valid or Items(*numbers(16, seed=1)), bs=8, num_workers=0, shuffle=False)

def mlp(): return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
def learner(model=None, cbs=None, dls=None, **kwargs):
    torch.manual_seed(0)
    return Learner(dls or data(), (model or mlp)(), **(dict(loss_func=MSELossFlat(), opt_func=SGD, cbs=cbs) | kwargs))

def left(make, to=None, fit=lambda l: l.fit_one_cycle(3, .1)):
    "Losses, weights and what `seen` holds after a fit, and warnings of it"
    learn = make()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        if to is not None: learn.to_xla(**to)
        with learn.no_bar(), learn.no_logging(): fit(learn)
    state = {k: v.detach().cpu().double() for k,v in learn.model.state_dict().items()}
    return learn,(list(map(float, learn.recorder.losses)), state, getattr(learn, 'seen', [])),[str(w.message) for w in told]

def compare(make, to, want=None, **kwargs):
    "As without XLA, where `want` is left if that is known; the learner, and what was told"
    want = want or left(make, **kwargs)[1]
    learn,got,told = left(make, to, **kwargs)
    test_close(got[0], want[0], eps=1e-4)
    assert got[1].keys() == want[1].keys()
    for k in want[1]: torch.testing.assert_close(got[1][k], want[1][k], rtol=1e-3, atol=1e-4)
    assert str(got[2]) == str(want[2])
    return learn,told

def plain(learn): return dict(learn.xla_report().plain)

default,three = {},dict(steps_per_execution=3)
def in_turn(told): return sum('one by one' in t for t in told)

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.n = nn.Linear(5, 6),nn.Linear(6, 1),0
    def forward(self, x):
        self.n += 1
        return self.b(self.change(torch.tanh(self.a(x))))
