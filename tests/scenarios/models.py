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
    hidden: object = None

@scenario
def returns_a_dataclass(): return out_learner(Output, lambda o: o.logits)

@scenario
def returns_a_dataclass_read_after_the_batch():
    class Reads(Train):
        def before_fit(self): self.all = []
        def after_batch(self): self.all.append(self.pred.logits.detach().mean())
    return out_learner(Output, lambda o: o.logits, cbs=Reads())
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
@scenario
def returns_a_frozen_dataclass_read_after_the_batch():
    class Reads(Train):
        def before_fit(self): self.all = []
        def after_batch(self): self.all.append(self.pred.logits.detach().mean())
    return out_learner(Frozen, lambda o: o.logits, cbs=Reads())
scenarios['returns_a_frozen_dataclass_read_after_the_batch'].seen = lambda l: torch.stack(l.reads.all)

Pair = namedtuple('Pair', 'logits n')
@scenario
def returns_a_named_tuple(): return out_learner(lambda x: Pair(x, 3), lambda o: o.logits)
@scenario
def returns_a_dict(): return out_learner(lambda x: dict(logits=x), lambda o: o['logits'])
@scenario
def returns_a_tuple_in_a_list(): return out_learner(lambda x: [(x, x.detach())], lambda o: o[0][0])
@scenario
def returns_a_namespace(): return out_learner(lambda x: SimpleNamespace(logits=x), lambda o: o.logits)

# State

@scenario
def hidden_state_is_0_first():
    class H(Net):
        def more(self, x):
            self.h = x.detach().mean(0)*.5 + self.h*.5
            return x+self.h
    return learner(H(h=0))

@scenario
def hidden_state_is_none_first():
    class H(Net):
        def more(self, x):
            if self.h is not None: x = x+self.h
            self.h = x.detach().mean(0)*.5
            return x
    return learner(H(h=None))

@scenario
def hidden_state_in_a_list():
    class H(Net):
        def more(self, x):
            x = x+self.h[0] if self.h else x
            self.h = [x.detach().mean(0)*.5]
            return x
    return learner(H(h=[]))

@scenario
def hidden_state_in_a_deque():
    class H(Net):
        def more(self, x):
            for h in self.h: x = x+.1*h
            self.h.append(x.detach().mean(0))
            return x
    return learner(H(h=deque(maxlen=3)))

@scenario
def hidden_state_in_a_dict():
    class H(Net):
        def more(self, x):
            x = x+self.h.get('h', 0)
            self.h['h'] = x.detach().mean(0)*.5
            return x
    return learner(H(h={}))

@scenario
def hidden_state_on_the_cpu():
    class H(Net):
        def more(self, x):
            self.h = self.h.to(x.device)
            x = x+self.h
            self.h = x.detach().mean(0)*.5
            return x
    return learner(H(h=torch.zeros(8)))

@scenario
def hidden_state_of_a_class():
    class H(Net):
        h = None
        def more(self, x):
            if H.h is not None: x = x+H.h
            H.h = x.detach().mean(0)*.5
            return x
    return learner(H())

@scenario
def hidden_state_in_a_module_global():
    global hidden
    hidden = None
    class H(Net):
        def more(self, x):
            global hidden
            if hidden is not None: x = x+hidden
            hidden = x.detach().mean(0)*.5
            return x
    return learner(H())

@scenario
def hidden_state_in_a_closure():
    def make():
        h = None
        def more(x):
            nonlocal h
            if h is not None: x = x+h
            h = x.detach().mean(0)*.5
            return x
        return more
    return learner(Net(more=make()))

@scenario
def hidden_state_as_a_function_attribute():
    def more(x):
        if more.h is not None: x = x+more.h
        more.h = x.detach().mean(0)*.5
        return x
    more.h = None
    return learner(Net(more=more))

@scenario
def hidden_state_in_a_thread_local():
    local = threading.local()
    local.h = None
    def more(x):
        if local.h is not None: x = x+local.h
        local.h = x.detach().mean(0)*.5
        return x
    return learner(Net(more=more))

@scenario
def hidden_state_in_a_weak_dict():
    import weakref
    states = weakref.WeakKeyDictionary()
    class H(Net):
        def more(self, x):
            x = x+states.get(self, 0.)
            states[self] = x.detach().mean(0)*.5
            return x
    return learner(H())

@scenario
def hidden_state_on_a_generator():
    def states():
        h = 0.
        while True:
            x = yield h
            h = x.detach().mean(0)*.5
    g = states()
    next(g)
    class H(Net):
        def more(self, x): return x+g.send(x)
    return learner(H())

@scenario
def counter_of_forward_passes():
    class C(Net):
        def more(self, x):
            self.n += 1
            return x*(1/self.n)
    return learner(C(n=0))

@scenario
def counter_on_a_nested_object():
    class C(Net):
        def more(self, x):
            self.conf.n += 1
            return x*(1/self.conf.n)
    return learner(C(conf=SimpleNamespace(n=0)))

@scenario
def every_other_forward_pass():
    class C(Net):
        def more(self, x):
            self.n += 1
            return x if self.n % 2 else -x
    return learner(C(n=0))

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
def loss_attribute_of_each_batch():
    class A:
        w = 1.
        def __call__(self, p, t): return F.cross_entropy(p, t)*self.w
    return learner(loss_func=A(), cbs=within(lambda l, i: setattr(l.loss_func, 'w', 1+.1*i), *range(20)))

@scenario
def model_by_the_epoch_of_its_learner():
    class A(Net):
        def more(self, x): return x*[1., .5, .25, 2.][self.learn[0].epoch]
    m = A()
    l = learner(m)
    m.learn = [l]
    return l

@scenario
def temperature_in_a_list_of_the_model():
    class A(Net):
        def more(self, x): return x*self.ts[self.k]
    return learner(A(ts=[1., .5, .25], k=0), cbs=within(lambda l, i: setattr(l.model, 'k', i//8), 8, 16))

@scenario
def lambda_layer():
    s = [1.]
    return learner(mlp(Lambda(lambda x: x*s[0])), cbs=within(lambda l, i: s.__setitem__(0, .1*i)))

@scenario
def forward_replaced():
    def change(l, i): l.model[3].forward = lambda x, f=l.model[3].forward: f(x)*.5
    return learner(cbs=within(change, 6))

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
def inner_module_in_a_plain_list():
    hidden = nn.Linear(8, 8)
    class A(Net):
        def more(self, x): return self.ls[0](x)
    def change(l, i):
        with torch.no_grad(): l.model.ls[0].weight.mul_(.5)
    class Moves(Train):
        def before_fit(self): self.model.ls[0].to(self.model.b.weight.device)
    return learner(A(ls=[hidden]), cbs=[Moves(), within(change)])

@scenario
def inner_module_in_a_plain_list_changes_a_setting():
    class A(Net):
        def more(self, x): return self.ls[0](x)
    return learner(A(ls=[nn.Hardtanh()]), cbs=within(lambda l, i: setattr(l.model.ls[0], 'max_val', .1*i)))

@scenario
def spectral_norm(): return learner(nn.Sequential(nn.Flatten(), nn.utils.spectral_norm(nn.Linear(16, 8)), nn.ReLU(), nn.Linear(8, 4)))

@scenario
def weight_norm(): return learner(nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)), nn.ReLU(), nn.Linear(8, 4)))

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
def feature_loss():
    feat = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval().requires_grad_(False)
    x = torch.randn(56, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    d = DataLoaders.from_dsets([(o, o*2) for o in x[:40]], [(o, o*2) for o in x[40:]], bs=8, num_workers=0, shuffle=False)
    return learner(nn.Conv2d(1, 1, 3, padding=1), data=d, loss_func=FeatureLoss(feat, [1, 2]), metrics=[])

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

def _two_heads(learn):
    learn.fit(2, 1e-2)
    learn.model[3] = nn.Linear(8, 4).to(learn.model[1].weight.device)
    with torch.no_grad(): learn.model[3].weight.fill_(.1), learn.model[3].bias.zero_()
    learn.create_opt()
    learn.fit(2, 1e-2)
@scenario(fit=_two_heads)
def new_head_between_two_fits(): return learner()

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
def gradient_reversal():
    class Rev(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, lam):
            ctx.lam = lam
            return x.clone()
        @staticmethod
        def backward(ctx, g): return -ctx.lam*g,None
    class A(Net):
        def more(self, x): return x+Rev.apply(x, self.lam)
    class Sets(Train):
        def before_batch(self): self.model.lam = 2/(1+math.exp(-10*self.pct_train))-1
    return learner(A(lam=0.), cbs=Sets())
