"Models: what they return, keep, count and draw"
import dataclasses, random, threading
from collections import deque, namedtuple
from fastai.callback.all import *
from fastai.callback.hook import Hook, hook_outputs
from .base import *
from .losses import within
from .callbacks import Train

class Net(nn.Module):
    "A model with something more in its `forward`"
    def __init__(self, **kwargs):
        super().__init__()
        self.a,self.b = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU()),nn.Linear(8, 4)
        for k,v in kwargs.items(): setattr(self, k, v)
    def forward(self, x): return self.b(self.more(self.a(x)))
    def more(self, x): return x

def out_learner(make, get, **kwargs):
    "A model that returns its logits in an object"
    class Out(Net):
        def forward(self, x): return make(super().forward(x))
    return learner(Out(), loss_func=lambda p, t: F.cross_entropy(get(p), t), metrics=lambda p, t: F.cross_entropy(get(p), t), **kwargs)

@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list

@scenario
def returns_a_dataclass_read_after_the_batch():
    class Reads(Train):
        def before_fit(self): self.all = []
        def after_batch(self): self.all.append(self.pred.logits.detach().mean())
    return out_learner(lambda x: Output(x, [x.mean()]), lambda o: o.logits*(1+.1*o.hidden[0]), cbs=Reads())
scenarios['returns_a_dataclass_read_after_the_batch'].seen = lambda l: torch.stack(l.reads.all)

@scenario
def returns_an_attr_dict_read_after_the_batch():
    class Reads(Train):
        def before_fit(self): self.all = []
        def after_batch(self): self.all.append(self.pred.logits.detach().mean())
    return out_learner(lambda x: AttrDict(logits=x), lambda o: o.logits, cbs=Reads())
scenarios['returns_an_attr_dict_read_after_the_batch'].seen = lambda l: torch.stack(l.reads.all)

class Plain:
    def __init__(self, logits): self.logits = logits
@scenario
def returns_an_object_read_after_the_batch():
    class Reads(Train):
        def before_fit(self): self.all = []
        def after_batch(self): self.all.append(self.pred.logits.detach().mean())
    return out_learner(Plain, lambda o: o.logits, cbs=Reads())
scenarios['returns_an_object_read_after_the_batch'].seen = lambda l: torch.stack(l.reads.all)

class Slotted:
    __slots__ = 'logits',
    def __init__(self, logits): self.logits = logits
@scenario
def returns_an_object_with_slots_read_after_the_batch():
    class Reads(Train):
        def before_fit(self): self.all = []
        def after_batch(self): self.all.append(self.pred.logits.detach().mean())
    return out_learner(Slotted, lambda o: o.logits, cbs=Reads())
scenarios['returns_an_object_with_slots_read_after_the_batch'].seen = lambda l: torch.stack(l.reads.all)

@dataclasses.dataclass(frozen=True)
class Frozen: logits: torch.Tensor

Pair = namedtuple('Pair', 'logits n')
@scenario
def returns_a_named_tuple(): return out_learner(lambda x: Pair(x, 3), lambda o: o.logits)
@scenario
def returns_a_namespace(): return out_learner(lambda x: SimpleNamespace(logits=x), lambda o: o.logits)

@scenario
def counter_on_a_nested_object():
    class C(Net):
        def more(self, x):
            self.conf.n += 1
            return x*(1/self.conf.n)
    return learner(C(conf=SimpleNamespace(n=0)))

@scenario
def progressive_layers():
    class P(Net):
        def more(self, x):
            for l in self.ls[:self.n]: x = x+l(x)
            return x
    m = P(ls=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), n=1)
    return learner(m, cbs=within(lambda l, i: setattr(l.model, 'n', 1+i//6), 6, 12))

@scenario
def model_attribute_of_each_batch():
    class A(Net):
        def more(self, x): return x*self.alpha
    return learner(A(alpha=1.), cbs=within(lambda l, i: setattr(l.model, 'alpha', 1+.1*i), *range(20)))

@scenario
def model_by_the_epoch_of_its_learner():
    class A(Net):
        def more(self, x): return x*[1., .5, .25, 2.][self.learn[0].epoch]
    m = A()
    l = learner(m)
    m.learn = [l]
    return l

@scenario
def lambda_layer():
    s = [1.]
    return learner(mlp(Lambda(lambda x: x*s[0])), cbs=within(lambda l, i: s.__setitem__(0, .1*i)))

@scenario
def activation_replaced():
    class A(Net):
        def more(self, x): return self.act(x)
    return learner(A(act=F.relu), cbs=within(lambda l, i: setattr(l.model, 'act', torch.tanh), 6))

@scenario
def function_patched_in_a_module():
    import scenarios.models as me
    me.activation = torch.relu
    class A(Net):
        def more(self, x): return activation(x)
    def change(l, i): me.activation = torch.tanh
    return learner(A(), cbs=within(change, 6))

@scenario
def inner_module_in_a_plain_list_changes_a_setting():
    class A(Net):
        def more(self, x): return self.ls[0](x)
    return learner(A(ls=[nn.Hardtanh()]), cbs=within(lambda l, i: setattr(l.model.ls[0], 'max_val', .1*i)))

# Hooks

@scenario
def features_by_hooks():
    class Feat(Train):
        def before_fit(self): self.hooks = hook_outputs([self.model[1]], detach=False)
        def after_loss(self): self.learn.loss_grad = self.loss_grad + .1*self.hooks.stored[0].square().mean()
        def after_fit(self): self.hooks.remove()
    return learner(cbs=Feat())

@scenario
def features_by_a_hook_into_a_dict():
    feats = {}
    class Feat(Train):
        def before_fit(self): self.h = self.model[1].register_forward_hook(lambda m, x, y: feats.update(a=y))
        def after_loss(self): self.learn.loss_grad = self.loss_grad + .1*feats['a'].square().mean()
        def after_fit(self): self.h.remove()
    return learner(cbs=Feat())

class FeatureLoss(nn.Module):
    def __init__(self, m_feat, ids):
        super().__init__()
        self.m_feat,self.hooks = m_feat,hook_outputs([m_feat[i] for i in ids], detach=False)
    def make(self, x, clone=False):
        self.m_feat(x)
        return [(o.clone() if clone else o) for o in self.hooks.stored]
    def forward(self, pred, targ):
        out,inp = self.make(targ, clone=True),self.make(pred)
        return F.l1_loss(pred, targ) + sum(F.l1_loss(a, b) for a,b in zip(inp, out))

@scenario
def feature_loss_with_its_metrics():
    class Named(FeatureLoss):
        def forward(self, pred, targ):
            res = super().forward(pred, targ)
            self.metrics = dict(pixel=res)
            return res
    feat = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval().requires_grad_(False)
    x = torch.randn(56, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    d = DataLoaders.from_dsets([(o, o*2) for o in x[:40]], [(o, o*2) for o in x[40:]], bs=8, num_workers=0, shuffle=False)
    return learner(nn.Conv2d(1, 1, 3, padding=1), data=d, loss_func=Named(feat, [1, 2]), metrics=[])

def _fits_after_a_hook(learn):
    learn.fit(2, 1e-2)
    with Hook(learn.model[1], lambda m, i, o: o.detach().clone()) as h:
        with torch.no_grad(): learn.model.eval()(learn.dls.valid.one_batch()[0])
    with Hook(learn.model[1], lambda m, gi, go: go[0].detach().clone(), is_forward=False) as hg:
        learn.model(learn.dls.valid.one_batch()[0])[0, 1].backward()
    learn.cam = h.stored.mean(), hg.stored.mean()
    learn.fit(2, 1e-2)
@scenario(fit=_fits_after_a_hook)
def fits_after_grad_cam(): return learner()
scenarios['fits_after_grad_cam'].seen = lambda l: l.cam

def _part_on_the_cpu(learn):
    learn.fit(2, 1e-2)
    learn.model[3].cpu()
    learn.model[3].bias.sum().item()
    learn.fit(2, 1e-2)
@scenario(fit=_part_on_the_cpu)
def part_on_the_cpu_between_two_fits(): return learner(opt_func=Adam)
scenarios['part_on_the_cpu_between_two_fits'].seen = lambda l: [l.opt.state[p]['step'] for p in l.model.parameters()]

def _copies_read(learn):
    learn.fit(2, 1e-2)
    copies = [p.detach().clone() for p in learn.model.parameters()]
    was = [float(c.sum()) for c in copies]
    kept = deepcopy(learn.model.state_dict())
    learn.fit(2, 1e-2)
    learn.was = was,[float(c.sum()) for c in copies],[float(v.sum()) for v in kept.values()]
@scenario(fit=_copies_read)
def copies_of_weights(): return learner()
scenarios['copies_of_weights'].seen = lambda l: l.was

@scenario
def checkpointed():
    from torch.utils.checkpoint import checkpoint
    class C(Net):
        def more(self, x): return checkpoint(self.lin, x, use_reentrant=False)
    return learner(C(lin=nn.Linear(8, 8)))

@scenario
def own_autograd_function():
    class Scaled(torch.autograd.Function):
        k = 1.
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): return g*Scaled.k
    class A(Net):
        def more(self, x): return Scaled.apply(x)
    return learner(A(), cbs=within(lambda l, i: setattr(Scaled, 'k', .1*i)))

@scenario
def membranes_of_the_shape_of_the_last_step():
    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin,self.head = nn.Linear(16, 8),nn.Linear(8, 4)
            self.register_buffer('mem', torch.zeros(8, 8), persistent=False)
        def forward(self, x):
            x,self.mem = self.lin(x.flatten(1)),torch.zeros_like(self.mem)
            for i in range(3): self.mem = .9*self.mem + x
            return self.head(self.mem.new_ones(8, 8) * self.mem.tanh())
    return learner(Leaky())
scenarios['membranes_of_the_shape_of_the_last_step'].seen = lambda l: l.model.mem.detach()
