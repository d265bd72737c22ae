"Nothing that a user holds is lost by a fit: copies of weights, of optimizer state and of whole learners keep their values"
from copy import deepcopy

import pytest, torch
from torch import nn

from fastai.vision.all import *
from fastai_xla.all import *
from tests.common import *

class Own(Callback):
    "Code of the user's, which runs at every step"
    def after_pred(self): self.learn.pred = self.pred*1.

modes = dict(recorded=dict(), retraced=dict(replay=False), grouped=dict(steps_per_execution=2), logged=dict(cbs=Own()))

def params(learn): return list(learn.model.parameters())

def loaded(learn):
    m = convnet().to(device())
    m.load_state_dict(learn.model.state_dict())
    return list(m.state_dict().values())

ways = dict(clone=lambda l: [p.detach().clone() for p in params(l)], data=lambda l: [p.data.clone() for p in params(l)],
    parameter=lambda l: [nn.Parameter(p.data.clone()) for p in params(l)],
    state_dict=lambda l: list(deepcopy(l.model.state_dict()).values()),
    model=lambda l: list(deepcopy(l.model).state_dict().values()), tensor=lambda l: [torch.tensor(p.detach()) for p in params(l)],
    to=lambda l: [p.detach().to(p.device, copy=True) for p in params(l)],
    copy_=lambda l: [torch.empty_like(p).copy_(p.detach()) for p in params(l)],
    expanded=lambda l: [p.detach().expand(1, *p.shape).clone() for p in params(l)], load_state_dict=loaded,
    optimizer=lambda l: [v.clone() for s in l.opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)])

def small_learner(cbs=None, **kwargs):
    torch.manual_seed(0)
    return image_learner(image_dls(n=4*16, n_valid=2*16, shuffle=False), opt_func=Adam, cbs=cbs).to_xla(**kwargs)

def read(ts): return [t.detach().cpu() for t in ts]

@pytest.mark.parametrize('mode', modes)
def test_copies_that_were_read_survive_a_fit(mode):
    "A copy that has been printed or read shared the memory of the weights, which the next update takes"
    learn = small_learner(**modes[mode])
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-2)
        held = {name: way(learn) for name,way in ways.items()}
        values = {name: read(ts) for name,ts in held.items()}
        learn.fit(2, 1e-2)
    assert not torch.equal(read(params(learn))[0], values['clone'][0])
    for name,ts in held.items():
        assert all(torch.equal(a, b) for a,b in zip(read(ts), values[name])), name

def test_a_copied_learner_trains_on_its_own():
    "A copy and its original are two learners: both train, and what one does leaves the other as it is"
    learn = small_learner()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-2)
        other = deepcopy(learn)
        before = read(params(other))
        learn.fit(1, 1e-2)
        assert all(torch.equal(a, b) for a,b in zip(read(params(other)), before))
        after = read(params(learn))
        with other.no_bar(), other.no_logging(): other.fit(1, 1e-2)
        assert all(torch.equal(a, b) for a,b in zip(read(params(learn)), after))
    for a,b in zip(read(params(other)), after): assert (a-b).abs().max() < 1e-4
