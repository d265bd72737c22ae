"Functions of the user's that read settings, and what changes these between two fits"
from types import SimpleNamespace
from common import *
from fastai_xla.all import *

def ce(p, y): return F.cross_entropy(p, y)

# What is read, and changes between two fits

alpha,cfg,weights,funcs = 1.,SimpleNamespace(),torch.ones(4),[]
def act(x): return x
class Scaled(Module):
    "A layer with settings in an object"
    def __init__(self): self.cfg = SimpleNamespace(scale=1.)
    def forward(self, x): return x*self.cfg.scale

def reset():
    global alpha, weights, act
    alpha,cfg.gamma,weights,funcs[:] = 1.,1.,torch.ones(4),[abs]
    def act(x): return x
    Scaled.forward = lambda self, x: x*self.cfg.scale

def learner(loss=ce, *layers, **kw):
    reset()
    learn = image_learner(loss_func=loss, **kw)
    for l in layers: learn.model.append(l)
    return learn

def set_alpha(_):
    global alpha
    alpha = .3
def set_weights(_):
    global weights
    weights = torch.tensor([1.,.5,.5,1.])
def set_act(_):
    global act
    def act(x): return x*.3
def patch_forward(_): Scaled.forward = lambda self, x: x*.3

def closure():
    beta = 1.
    def loss(p, y): return ce(p, y)*beta
    def change(_):
        nonlocal beta
        beta = .3
    return loss,change
def with_partial():
    loss = partial(F.cross_entropy, label_smoothing=.1)
    return loss,lambda _: loss.keywords.update(label_smoothing=.4)

reads = dict(global_number=(lambda: learner(lambda p,y: ce(p, y)*alpha), set_alpha),
    host_tensor=(lambda: learner(lambda p,y: F.cross_entropy(p, y, weight=weights.to(p.device))), set_weights),
    functions=(lambda: learner(lambda p,y: funcs[0](ce(p, y))), lambda _: funcs.__setitem__(0, torch.sqrt)),
    redefined=(lambda: learner(lambda p,y: act(ce(p, y))), set_act), patched=(lambda: learner(ce, Scaled()), patch_forward),
    model_settings=(lambda: learner(ce, Scaled()), lambda l: setattr(l.model[-1].cfg, 'scale', .3)),
    metric=(lambda: learner(metrics=lambda p,y: (p.softmax(1).max(1).values > alpha-.7).float().mean()), set_alpha))
reads |= {f.__name__: f for f in (closure, with_partial)}

def story(name):
    if callable(reads[name]):
        found = []
        def make():
            loss,change = reads[name]()
            found[:] = [change]
            return learner(loss)
        change = lambda l: found[0](l)
    else: make,change = reads[name]
    def fits(learn):
        learn.fit(1, 1e-2)
        change(learn)
        learn.fit(1, 1e-2)
    return make,fits
