"Objects of the user's that can be used, and of which nobody may ask anything else: as fastai on the CPU"
import warnings
from dataclasses import dataclass
from unittest.mock import MagicMock, Mock
import pytest, torch
from fastai.vision.all import *
from fastai_xla.all import *
from on_both import *
from as_one import agrees
from test_other_loaders import Turns, tensors

class Loud:
    "It has a number and can be called; all else is an error"
    def __init__(self): self.w = .5
    def __call__(self, x): return x*self.w
    def _no(self, *args): raise RuntimeError('who asks?')
    __eq__ = __ne__ = __bool__ = __len__ = __iter__ = __contains__ = __repr__ = __deepcopy__ = __reduce_ex__ = __getattr__ = _no
    __hash__ = None

class Config(dict):
    "As many projects have one"
    __getattr__ = dict.__getitem__
    def __init__(self): super().__init__(w=.5)
    def __call__(self, x): return x*self['w']

@dataclass
class Hits:
    "A dataclass is compared by its values, and cannot be hashed"
    w: float = 1.
    __name__ = 'hits'
    def __call__(self, pred, targ): return (pred.argmax(-1) == targ).float().mean()*self.w

@dataclass
class Step:
    w: float = 1.
    def __call__(self, p, lr, **kwargs): p.data.add_(p.grad.data, alpha=-lr*self.w)

def odd_learner(odd, by_hand=True):
    "With such an object wherever one may be held; the model's module is the user's or a library's"
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.net,self.odd = mlp(),odd()
        def forward(self, x): return self.odd(self.net(x))*(1+self.odd.w)
    class Weigh(Callback):
        def __init__(self): self.odd,self.more = odd(),[odd()]
        def after_loss(self):
            if self.training: self.learn.loss_grad = self.more[0](self.loss_grad)*self.odd.w
    class Loss:
        def __init__(self): self.odd = odd()
        def __call__(self, pred, targ): return self.odd(F.cross_entropy(pred, targ))
    dls = image_dls(n=5*8, n_valid=2*8, bs=8, shuffle=False)
    model,opt = Net() if by_hand else mlp(),partial(Optimizer, cbs=[Step()])
    learn = Learner(dls, model, loss_func=Loss(), metrics=Hits(), cbs=Weigh(), opt_func=opt)
    inner = model.net if by_hand else model
    inner[1].odd,inner[1].more = odd(),[odd()]
    return learn

@pytest.mark.parametrize('by_hand', [True, False])
@pytest.mark.parametrize('odd', [Loud, Config])
def test_nobody_asks(odd, by_hand): assert not plain(compare(partial(odd_learner, odd, by_hand), fits))

@pytest.mark.parametrize('odd', [Loud, Config])
def test_nobody_asks_where_steps_are_recorded(odd, recorded): compare(partial(odd_learner, odd), fits, replays=['auto'])

def test_buffers_of_a_loss_that_a_lambda_holds():
    "One is replaced, the other changed; nobody knew of either, and the process died"
    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            for n in ('center', 'count'): self.register_buffer(n, torch.zeros(1))
        def forward(self, pred, targ):
            if torch.is_grad_enabled():
                self.center = self.center*.9 + pred.detach().mean(0)*.1
                self.count += 1
            return F.mse_loss(pred-self.center/(1+self.count), targ)
    def story():
        held = Centered()
        class Move(Callback):
            def before_fit(self): held.to(self.dls.device)
        return dict(loss_func=lambda pred,targ: held(pred, targ), cbs=Move()),lambda learn: dict(held.state_dict())
    agrees(story, 'Centered.center, of a module that is no attribute of the model or the loss, changes')

def test_a_second_loader_within_the_step():
    "Its batches are read ahead by a thread of the package's, which is none of the user's"
    class Joins(Callback):
        def before_fit(self):
            self.dl = DataLoader(list(zip(*tensors(80))), bs=4, num_workers=0, device=first(self.model.parameters()).device)
        def before_batch(self):
            if not self.training: return
            if self.iter == 0: self.it = iter(self.dl)
            x,y = next(self.it)
            self.learn.xb,self.learn.yb = (torch.cat([self.x, x]),),(torch.cat([self.y, y]),)
    def make(): return Learner(DataLoaders(Turns(80), Turns(16)), nn.Linear(8, 4), loss_func=CrossEntropyLossFlat(), cbs=Joins())
    assert not plain(compare(make, fits))

def test_arrays_beside_tensors():
    "In a dict of the batch, and other ones in each"
    class Named(Turns):
        def __iter__(self):
            for x,y in super().__iter__(): yield dict(x=x, w=x[:,0].numpy().copy(), ids=y.tolist()),y
    class Weighed(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(8, 4)
        def forward(self, b): return self.lin(b['x'])*torch.as_tensor(b['w'], device=b['x'].device)[:,None] + sum(b['ids'])/50
    def make(): return Learner(DataLoaders(Named(80), Named(16)), Weighed(), loss_func=CrossEntropyLossFlat())
    assert not plain(compare(make, fits))

def test_a_mock_is_called_after_each_batch():
    "As one of wandb's; each has a class of its own, and makes what it is asked for: who looks through it comes to no end"
    class Logs(Callback):
        def __init__(self): self.wandb = MagicMock()
        def after_batch(self): self.wandb.log(dict(loss=self.loss.item(), iter=self.iter))
    def story(learn):
        fits(learn)
        return [c.args[0] for c in learn.logs.wandb.log.call_args_list]
    compare(lambda: learner(cbs=Logs()), story)

@pytest.mark.parametrize('cls', [dict, list, nn.Module])
def test_a_mock_that_stands_for_a_class(cls):
    "It says that it is of the class, and has nothing of it"
    class Keeps(Callback):
        def __init__(self): self.odd = Mock(spec=cls)
        def after_batch(self): self.seen = self.loss
    def make():
        learn = learner(cbs=Keeps())
        vars(learn.model[1])['odd'] = Mock(spec=cls)
        return learn
    compare(make, fits)

def test_a_metric_of_numpys_numbers(recorded):
    "The sum that had begun on the host began again"
    def total(pred, targ): return pred.sum().cpu().numpy()
    compare(lambda: learner(metrics=total), partial(fits, n=3), replays=['auto'])

def test_random_states_of_the_host_stay_there():
    "A model that keeps one, as reversible layers do; and a buffer with a graph is asked for no gradient"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin,self.state = nn.Linear(64, 4),None
            self.register_buffer('mean', torch.zeros(1))
        def forward(self, x):
            x = self.lin(x.flatten(1))
            if self.training:
                now,self.state = self.state,torch.get_rng_state()
                if now is not None: torch.set_rng_state(now)
                x = x + torch.rand(4).to(x.device)
            self.mean = x.mean()[None]
            return x
    def make(): return Learner(image_dls(n=5*8, n_valid=2*8, bs=8, shuffle=False), Net(), loss_func=CrossEntropyLossFlat())
    def story(learn):
        fits(learn)
        return learn.model.state.device.type
    with warnings.catch_warnings():
        warnings.filterwarnings('error', 'The .grad attribute|The model keeps')
        compare(make, story)

def test_a_view_of_a_parameter_that_is_unfrozen_within_the_step():
    "As in a GAN's loop: it follows the parameter, and nobody else has given it a graph"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin,self.bias = nn.Linear(64, 4, bias=False),nn.Parameter(torch.zeros(4))
        def forward(self, x): return self.lin(x.flatten(1)) + self.bias.view(1, 4)
    class Alternates(Callback):
        def before_batch(self):
            if not self.training: return
            self.model.requires_grad_(False)
            frozen = self.model(self.x).pow(2).mean()
            for p in self.model.parameters(): p.requires_grad = True
            self.learn.loss_scale = 1+frozen
        def after_loss(self):
            if self.training: self.learn.loss_grad = self.loss_grad*self.loss_scale
    def make():
        return Learner(image_dls(n=5*8, n_valid=2*8, bs=8, shuffle=False), Net(), loss_func=CrossEntropyLossFlat(), cbs=Alternates())
    assert not plain(compare(make, fits))
