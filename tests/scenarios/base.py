"A scenario is a function that makes a learner; others say how it is fitted, and what else to look at"
import warnings
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch as mocked

from fastai.vision.all import *
from common import *
from fastai_xla.all import *
from fastai_xla.capture.program import Program
from fastai_xla.capture.recording import Recording
from fastai_xla.seeds import manual_seed
from fastai_xla.logged import Logged
from fastai_xla.runtime import xla_counts
from fastai_xla.transfer import fetch

scenarios = {}

def scenario(f=None, **kwargs):
    """Put a scenario on the list

    `fit`: what is done with the learner. `seen`: what else is compared. `cpu=False`: it draws on the device, where no other device draws
    the same. `to`: arguments of `to_xla`. `tol`: for replayed against retraced"""
    def put(f):
        assert f.__name__ not in scenarios, f.__name__
        scenarios[f.__name__] = SimpleNamespace(**dict(make=f, fit=fits, seen=nothing, cpu=True, to={}, tol=0) | kwargs)
        return f
    return put(f) if f else put

def nothing(learn): return 0
def fits(learn): learn.fit(4, 1e-2)   # 20 steps
def cross_entropy(pred, targ): return F.cross_entropy(pred, targ)
def dls(**kwargs): return image_dls(**dict(n=5*8, n_valid=2*8, bs=8, size=4, shuffle=False) | kwargs)
def mlp(*layers): return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), *layers, nn.ReLU(), nn.Linear(8, 4))

def learner(model=None, data=None, **kwargs):
    return Learner(data or dls(), model or mlp(), **dict(loss_func=cross_entropy, opt_func=SGD, metrics=accuracy) | kwargs)

def of_loss(loss, **kwargs):
    "A learner whose loss knows it"
    learn = learner(loss_func=loss, **kwargs)
    loss.learn = learn
    return learn

@contextmanager
def counting(counts):
    "Count batches and replayed steps"
    def counted(f, k):
        def g(self, *args, **kwargs):
            counts[k] = counts.get(k, 0) + 1
            return f(self, *args, **kwargs)
        return g
    with (mocked.object(Recording, 'run', counted(Recording.run, 'replayed')),
          mocked.object(Program, 'run', counted(Program.run, 'logged')), mocked.object(Logged, '_tell', counted(Logged._tell, 'traced')),
          mocked.object(Learner, '_do_one_batch', counted(Learner._do_one_batch, 'batches'))): yield

def play(s, on_xla=True, **to):
    "What a scenario leaves: losses of each step, metrics of each epoch, weights, and what else it looks at"
    set_seed(0)
    manual_seed(0)
    learn,counts = s.make(),Counter()
    learn.recorder.smooth_loss.beta = 0   # the loss as it is
    if on_xla: learn.to_xla(**({} if to else s.to) | to)
    with learn.no_logging(), learn.no_bar(), warnings.catch_warnings(), counting(counts):
        warnings.simplefilter('ignore')
        s.fit(learn)
    rec = learn.recorder
    return learn,counts,fetch(dict(losses=list(rec.losses), values=list(map(list, rec.values)), seen=s.seen(learn),
                                   weights=[o.detach() for o in learn.model.state_dict().values()]))

def leaves(o, at=''):
    "(where, number or tensor) for all that is in `o`"
    if isinstance(o, dict): return [l for k,v in o.items() for l in leaves(v, f'{at}.{k}')]
    if isinstance(o, (list, tuple, L)): return [l for i,v in enumerate(o) for l in leaves(v, f'{at}.{i}')]
    return [(at, o)]

def differences(a, b, tol):
    a,b = dict(leaves(a)),dict(leaves(b))
    def close(x, y):
        if x is None or y is None or isinstance(x, str): return x == y
        x,y = (torch.as_tensor(o).detach().double() for o in (x, y))
        return x.shape == y.shape and torch.allclose(x, y, rtol=tol, atol=tol, equal_nan=True)
    return [(k, a.get(k), b.get(k)) for k in {**a, **b} if k not in a or k not in b or not close(a[k], b[k])]

def unexplained(learn, counts):
    "What a fit has cost of which its report says nothing"
    report,res = learn.xla_report(),[]
    replay = learn.xla_opt.replay
    done = counts['replayed'] + counts['logged'] + min(counts['traced'], 8)   # a path, or a kind of batch, that is new
    if not report.plain and replay.n_steps == 1 and done < counts['batches']:
        res.append(f"{counts['batches']-done} of {counts['batches']} were not replayed")
    for p in ('training', 'validation'):
        cost = report.per_batch(p)
        if cost['executions'] > 1.01 and not (report.plain or report.beside): res.append(f"{cost['executions']} executions per {p} batch")
        if cost['compiles'] > 0 and not (report.plain or report.beside): res.append(f"{cost['compiles']} compiles per {p} batch")
        if cost['to host'] and not (report.plain or report.beside): res.append(f"{cost['to host']} transfers to the host per {p} batch")
    return res
