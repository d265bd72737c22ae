"`torch.func`: functions that are differentiated, batched and both, on the XLA device as on the CPU"
from copy import deepcopy

from functools import partial
import pytest, torch
import torch.nn.functional as F
from fastai.basics import *
from torch import nn
from torch.autograd import forward_ad
from torch.utils.data import TensorDataset
from torch.func import functional_call, grad, hessian, jvp, stack_module_state, vjp, vmap

from fastai_xla.all import *

def close(f):
    "`f` of a device gives the same there"
    assert torch.allclose(f('cpu'), f(device()).cpu(), atol=1e-5)

class Last(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn
    def forward(self, x): return self.rnn(x)[0]

models = dict(linear=nn.Linear(4, 3), layernorm=nn.LayerNorm(4), softmax=nn.Softmax(-1), lstm=Last(nn.LSTM(4, 3)), gru=Last(nn.GRU(4, 3)),
              pool=nn.Sequential(nn.Unflatten(-1, (1, 2, 2)), nn.AvgPool2d(2), nn.Flatten()),
              adaptive=nn.Sequential(nn.Unflatten(-1, (1, 2, 2)), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
              attention=nn.TransformerEncoderLayer(4, 2, 8, dropout=0., batch_first=True))

@pytest.mark.parametrize('name', models)
def test_a_model_is_differentiated(name):
    torch.manual_seed(0)
    m,x = {d: deepcopy(models[name]).to(d) for d in ('cpu', device())},torch.randn(2, 5, 4)
    if name in ('pool', 'adaptive'): x = x.flatten(0, 1)
    def loss(d): return lambda o: m[d](o).square().sum()
    close(lambda d: grad(loss(d))(x.to(d)))
    close(lambda d: vjp(loss(d), x.to(d))[1](torch.ones((), device=d))[0])
    if name in ('lstm', 'gru', 'attention'): return   # PyTorch has no second derivative of them on the CPU
    close(lambda d: jvp(loss(d), (x.to(d),), (torch.ones_like(x, device=d),))[1])
    close(lambda d: grad(lambda o: grad(loss(d))(o).square().sum())(x.to(d)))

losses = dict(cross_entropy=F.cross_entropy, smoothed=lambda p, y: F.cross_entropy(p, y, label_smoothing=.1),
              weighted=lambda p, y: F.cross_entropy(p, y, weight=torch.arange(1., 5, device=p.device)),
              nll=lambda p, y: F.nll_loss(p.log_softmax(1), y, ignore_index=1), huber=lambda p, y: F.huber_loss(p[:,0], y.float()),
              cosine=lambda p, y: F.cosine_embedding_loss(p, p.flip(0), y*2.-1))

@pytest.mark.parametrize('name', losses)
def test_a_loss_is_differentiated_once_and_twice(name):
    f,y = losses[name],torch.tensor([0, 1, 1, 0, 1])
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    close(lambda d: grad(lambda p: f(p, y.to(d)))(x.to(d)))
    close(lambda d: hessian(lambda p: f(p, y.to(d)))(x.to(d)))

@pytest.mark.parametrize('layer,size', [(nn.Linear, ()), (partial(nn.Conv2d, kernel_size=1), (5, 5))], ids=['samples', 'pixels'])
def test_an_ensemble_trains_with_the_gradients_of_its_members(layer, size):
    "torch_xla does not compute the total of the weights by which `vmap` divides the gradient of a mean"
    torch.manual_seed(0)
    members,x,y = [layer(4, 3) for _ in range(3)],torch.randn(8, 4, *size),torch.randint(3, (8, *size))
    def grads(d):
        params,_ = stack_module_state([deepcopy(m).to(d) for m in members])
        def loss(p): return F.cross_entropy(functional_call(members[0], p, (x.to(d),)), y.to(d))
        return vmap(grad(loss))(params)['weight']
    close(grads)
    each = torch.stack([torch.autograd.grad(F.cross_entropy(m(x), y), m.weight)[0] for m in members])
    assert torch.allclose(each, grads(device()).cpu(), atol=1e-5)

@pytest.mark.parametrize('weight', [None, torch.tensor([1., 2, 3])])
@pytest.mark.parametrize('shape', [(3,), (6, 3)])
def test_the_total_of_the_weights_is_computed(shape, weight):
    torch.manual_seed(0)
    op = torch.ops.aten.nll_loss_forward
    x,y = torch.randn(shape),torch.randint(3, shape[:-1])
    for ignore in (-100, 1):
        for i in (0, 1):
            close(lambda d: op(x.to(d), y.to(d), None if weight is None else weight.to(d), 2, ignore)[i])

class Forwards(nn.Module):
    "Adds the derivative of its layer along ones, as a sketch of what it depends on"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        with forward_ad.dual_level():
            y = self.layer(forward_ad.make_dual(x, torch.ones_like(x)))
            along = forward_ad.unpack_dual(torch.zeros_like(y).lerp_(y, .3)).tangent
        return self.layer(x) + along

def test_derivatives_forwards_within_a_step():
    "Their block is over where a replayed step's calls are made: the fit ended with an error of torch's"
    x,y,res = torch.randn(32, 4),torch.randn(32, 3),{}
    for mode in ('cpu', 'replayed', 'retraced'):
        set_seed(0)
        dls = DataLoaders(*(DataLoader(TensorDataset(x, y), bs=8) for _ in range(2)))
        learn = Learner(dls, Forwards(), loss_func=nn.MSELoss(), cbs=None)
        if mode != 'cpu': learn.to_xla(replay='auto' if mode == 'replayed' else False)
        with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
        res[mode] = torch.stack(learn.recorder.losses)
        if mode == 'replayed': assert any('differentiates forwards' in why for why in learn.xla_report().plain)
    for mode in ('replayed', 'retraced'): assert torch.allclose(res[mode], res['cpu'], atol=1e-5)
