"A story of a learner on the CPU and on XLA, replayed and not, and what it leaves compared"
import pytest, torch
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.seeds import manual_seed
from fastai_xla.transfer import fetch
from common import *

def mlp(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4))
def learner(**kwargs):
    kwargs = dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy) | kwargs
    return Learner(image_dls(n=5*8, n_valid=2*8, bs=8, shuffle=False), mlp(), **kwargs)

def leaves(o, at=''):
    "(where, tensor or other thing) for all that is in `o`"
    if isinstance(o, dict): return [l for k,v in o.items() for l in leaves(v, f'{at}.{k}')]
    if isinstance(o, (list, tuple, L)): return [l for i,v in enumerate(o) for l in leaves(v, f'{at}.{i}')]
    return [(at, fetch(o.detach()).float() if isinstance(o, torch.Tensor) else o)]

def told(make, story, on_xla=False, **kwargs):
    "What `story` returns for the learner, its losses, its metrics and its weights"
    set_seed(0)
    manual_seed(0)
    learn = make()
    if on_xla: learn.to_xla(**kwargs)
    with learn.no_logging(), learn.no_bar(): res = story(learn)
    rec = learn.recorder
    return learn,dict(leaves(dict(told=res, losses=list(getattr(rec, 'losses', [])),
                                  values=list(map(list, getattr(rec, 'values', []))), weights=dict(learn.model.state_dict()))))

def agree(a, b, tol):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=tol, atol=tol/10)
    return type(a) == type(b) and (a == pytest.approx(b, rel=tol, abs=tol/10) if isinstance(a, float) else a == b)

def compare(make, story, tol=1e-4, replays=('auto', False)):
    "On the CPU and on XLA, replayed and not, the same comes out; the learner that replayed"
    learners,(_,there) = [],told(make, story)
    for replay in replays:
        learn,here = told(make, story, True, replay=replay)
        other = [k for k in {**there, **here} if k not in there or k not in here or not agree(there[k], here[k], tol)]
        assert not other, f"replay={replay}: {[(k, there.get(k), here.get(k)) for k in other[:4]]} and {len(other)} in all"
        learners.append(learn)
    return learners[0]

def plain(learn): return dict(learn.xla_report().plain)
def fits(learn, n=2): learn.fit(n, 1e-2)
