"A fit of a learner with code of the user's, replayed, retraced and on the CPU, and what it leaves compared"
import dataclasses, math, random
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
import numpy as np, pytest, torch, torch.nn.functional as F
from torch import nn
from fastai.basics import *
from fastai.callback.all import *
from fastai_xla.all import *
from fastai_xla.seeds import manual_seed
from fastai_xla.runtime import device

def items(n=192):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(n, 6, generator=g)
    return list(zip(x, x[:,:1]*2 - x[:,1:2]*x[:,2:3]))

def data(): return DataLoaders.from_dsets(items()[:160], items()[160:], bs=16, num_workers=0)
def mlp(o=1): return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, o))

def host(o):
    if isinstance(o, torch.Tensor): return o.detach().cpu().as_subclass(torch.Tensor).clone()
    if isinstance(o, dict): return {k: host(v) for k,v in o.items()}
    return [host(v) for v in o] if isinstance(o, (list, tuple, L)) else o

def leaves(o):
    if isinstance(o, dict): o = list(o.values())
    return [l for v in o for l in leaves(v)] if isinstance(o, (list, tuple)) else [o]

def run(story, replay, xla=True, n=3):
    "A fit of a story: what it leaves, and the learner"
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    manual_seed(3)
    kwargs = dict(model=mlp, loss_func=nn.MSELoss, cbs=list, see=lambda learn: None) | story()
    see,model,loss,cbs = (kwargs.pop(k) for k in ('see', 'model', 'loss_func', 'cbs'))
    learn = Learner(kwargs.pop('dls', data)(), model(), loss_func=loss(), **kwargs)
    if xla: learn.to_xla(replay=replay)
    with learn.no_bar(), learn.no_logging(): learn.fit(n, 1e-2, cbs=cbs())
    left = dict(losses=[float(o) for o in learn.recorder.losses], values=[[float(v) for v in r] for r in learn.recorder.values],
                sd=host(learn.model.state_dict()), see=host(see(learn)))
    return left,learn

def counts(learn): return learn.xla_opt.replay.by_log.fit.counts

def references(story, cpu=True, n=3):
    "What it leaves retraced, and on the CPU"
    return run(story, False, n=n)[0],run(story, False, xla=False, n=n)[0] if cpu else None

def same(story, tol=0., cpu=True, n=3, refs=None):
    "Replayed as retraced, and as on the CPU; `refs` where these are known, with None in the place of one that is left out"
    (a,c),(b,learn) = refs or references(story, cpu, n),run(story, 'auto', n=n)
    for k in a or ():
        for x,y in zip(leaves(a[k]), leaves(b[k]), strict=True):
            if isinstance(x, torch.Tensor): torch.testing.assert_close(x, y, rtol=tol, atol=tol)
            elif isinstance(x, float): assert x == y or abs(x-y) <= tol*max(1, abs(x)), (k, x, y)
            else: assert x == y, (k, x, y)
    if c: test_close(b['losses'], c['losses'], eps=1e-4*max(1, max(c['losses'])))
    return learn

def agree(story, branches=1, valid=1, tol=0., cpu=True, n=3, refs=None):
    "The same, and traced only where a path is new"
    learn = same(story, tol, cpu, n, refs)
    train,val = counts(learn)[True],counts(learn)[False]
    if branches is not None:
        assert train['traced'] == branches and not train['refused'], (train, learn.xla_opt.replay.reasons.why)
        assert train['replayed'] == 10*n - branches
        if valid is not None: assert (val['traced'], val['refused']) == (valid, 0)
    return learn

class Weight(Callback):
    "The loss times a number"
    ws = [1., .5, .1]
    def __init__(self, how): self.how,self.host = how,torch.linspace(1, .1, 3)
    def number(self, e):
        if self.how == 'list': return self.ws[e]
        if self.how == 'interp': return np.interp(e, [0, 2], [1., .1])
        if self.how == 'iter': return 1 + .01*self.train_iter
        if self.how == 'int': return 1 + e
        if self.how == 'float32': return np.float32(1/(1+e))
        if self.how == 'host tensor': return self.host[e]
        if self.how == 'sent tensor': return self.host[e].to(self.learn.loss.device)
        self.host.data[0] = 1 + .1*self.iter   # no version is bumped
        return self.host.to(self.learn.loss.device)[0]
    def after_loss(self):
        self.learn.loss_grad = self.learn.loss_grad*self.number(self.epoch)
        self.learn.loss = self.learn.loss_grad.clone()
