"The training of an energy model by Langevin dynamics: what a batch costs, what is found, and chains that go on"
from functools import partial
import fastprogress.fastprogress
import pytest, torch
from torch import nn
from fastai.vision.all import *
from fastai_xla.all import *
from common import *
from probe import Probe

fastprogress.fastprogress.NO_BAR = True

def cd_learner(model=None, n=8*16, **kwargs):
    model = model or nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 4))
    cd = ContrastiveDivergence(**(dict(n_steps=5, step_size=.1, noise=.01, clip=(-2,2), n_buffer=4) | kwargs))
    return Learner(image_dls(n=n), model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=[cd, Probe()])

@pytest.mark.parametrize('replay', [False, 'auto'])
def test_costs_of_a_training_batch(replay):
    """A batch costs what its steps cost, and two more: chains that start anew, and the training step

    While the buffer fills up there is also the noise to start with"""
    learn = cd_learner().to_xla(replay=replay)
    with learn.no_logging(): learn.fit(2, 1e-3)
    train = [c for t,_,c in learn.probe.rows if t]
    assert [c.executions for c in train[2:]] == [8]*2 + [7]*12
    assert not any(c.compiles for c in train[2:])
    assert all((c.traced or c.to_host == c.looks) and not c.n_fallbacks for c in train[2:])
    assert sum(c.traced and not c.audited for c in train[2:]) <= 2
    if not replay: assert all(c.executions == 1 and not c.compiles for c in learn.probe.steady(False))
    assert len(learn.contrastive_divergence.gaps) == 16 and not any(is_xla(g) for g in learn.contrastive_divergence.gaps)

class Quadratic(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu,self.a = nn.Parameter(torch.zeros(1)),nn.Parameter(torch.ones(1))
    def forward(self, x): return self.a*(x-self.mu).pow(2).flatten(1).sum(1)/2

def fit_quadratic(noise, n_steps=20):
    "An energy of two parameters, trained on 1024 numbers of mean 2 and standard deviation 0.5"
    torch.manual_seed(0)
    data = torch.randn(1024, 1)
    data = (data-data.mean())/data.std()*.5+2
    dsets = Datasets(L(range(1024)), [[data.__getitem__], [lambda i: torch.tensor(0)]], splits=[list(range(1024)), [0]])
    cd = ContrastiveDivergence(n_steps, .05, noise, energy=lambda m, x, *y: m(x), n_buffer=1, restart=0., l2=0.)
    learn = Learner(dsets.dataloaders(bs=256, num_workers=0), Quadratic(),
                    loss_func=lambda e, y: e.mean()*0, cbs=cd, opt_func=partial(SGD, mom=0.))
    with learn.no_logging(): learn.fit(40, .5); learn.fit(20, .1)
    return [p.item() for p in learn.model.parameters()]

def test_training_finds_mean_and_variance():
    "On the CPU; the documentation of `ContrastiveDivergence` does the same on XLA"
    mu,a = fit_quadratic(None)
    assert abs(mu-2) < .1 and abs(a-4) < .4

def test_training_with_scaled_noise_finds_the_scaled_energy():
    "The control: with half the noise the samples are those of exp(-4 energy), and the energy that fits is a quarter"
    mu,a = fit_quadratic(.05**.5/2)
    assert abs(mu-2) < .1 and abs(a-1) < .15

def test_chains_follow_the_learner():
    learn = cd_learner().to_xla()
    cd = learn.contrastive_divergence
    def place(): return {t.device.type for c in cd.chains for t in c}
    with learn.no_logging():
        learn.fit(1)
        assert place() == {'xla'}
        learn.detach_xla()
        assert place() == {'cpu'}
        before = cd.chains[0][1].clone()
        learn.fit(1)
        learn.to_xla().fit(1)
    assert place() == {'xla'} and cd.i == 24 and torch.equal(cd.chains[0][1].cpu(), before)

def test_chains_on_the_cpu_without_a_device_of_the_data():
    learn = cd_learner()
    learn.dls._device = None   # as `DataLoaders.from_dsets` leaves it
    with learn.no_logging():
        for _ in range(2): learn.fit(1)
    assert learn.contrastive_divergence.i > 8

def test_modes_are_as_before_and_other_batches_are_left_alone():
    learn = cd_learner(n=2*16+5)
    learn.dls[0].drop_last = False
    modes = []
    class Look(Callback):
        order = 5
        def after_pred(self): modes.append((self.training, self.model.training, self.model[1].training))
        def before_train(self): self.model[1].eval()   # as `BnFreeze` does
    learn.add_cb(Look())
    with learn.no_logging(): learn.fit(1)
    assert [m for m in modes if m[0]] == [(True,True,False)]*3
    assert len(learn.contrastive_divergence.gaps) == 2 and {len(c[0]) for c in learn.contrastive_divergence.chains} == {16}

def test_restart_from_data_is_contrastive_divergence_as_first_written():
    "`start=noop, restart=1`: every chain begins at the batch's data"
    seen = []
    learn = cd_learner(start=noop, restart=1., n_buffer=1, n_steps=1, step_size=0., noise=0., clip=None)
    class Look(Callback):
        order = 5
        def before_batch(self):
            if self.training: seen.append((self.contrastive_divergence.fake[0].clone(), self.x.clone()))
    learn.add_cb(Look())
    with learn.no_logging(): learn.fit(1)
    assert torch.equal(seen[0][0], seen[0][1])
