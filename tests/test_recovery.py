"What a fit finds after a detour: parts of the model that have been on the CPU, and fits that ended in an exception"
import os
os.environ.setdefault('PJRT_DEVICE', 'CPU')
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true')

import pytest, torch
from torch import nn
from fastai.vision.all import *
from fastai_xla.all import *
from common import *

def mlp(): return nn.Sequential(nn.Sequential(Flatten(), nn.Linear(64, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 4)))

def small(xla=None, opt=Adam, cbs=(), model=mlp, **kwargs):
    "A learner with 4 batches of training and 2 of validation; on XLA with the arguments `xla` for `to_xla`"
    torch.manual_seed(0)
    kwargs = dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy, splitter=params_of) | kwargs
    learn = Learner(image_dls(n=4*16, n_valid=2*16, shuffle=False), model(), opt_func=opt, cbs=list(cbs), **kwargs).remove_cb(ProgressCallback)
    return learn if xla is None else learn.to_xla(**xla)

def host(ts): return [t.detach().cpu() for t in ts]
def weights(learn): return host(learn.model.parameters())

def assert_same(got, expected, tol=2e-5):
    assert len(got) == len(expected)
    for a,b in zip(got, expected): assert (a-b).abs().max() <= tol*b.abs().max().clamp(min=1e-2)

torch_adam,torch_sgd = partial(OptimWrapper, opt=torch.optim.Adam),partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9)
opts = dict(adam=Adam, sgd=partial(SGD, mom=.9), ranger=ranger, torch_adam=torch_adam, torch_sgd=torch_sgd)

def part(learn): learn.model[0].cpu()
def whole(learn): learn.model.to('cpu')
def there_and_back(learn): learn.model.cpu().to(learn.dls.device)

class AtEpochEnd(Callback):
    "Does `f` to the learner after each epoch"
    def __init__(self, f): self.f = f
    def after_epoch(self): self.f(self.learn)

def two_fits(learn, trip=noop):
    with learn.no_logging():
        learn.fit(1, 1e-2)
        trip(learn)
        learn.fit(1, 1e-2)
    return learn

@pytest.mark.parametrize('opt', opts)
def test_optimizer_state_survives_a_trip_to_the_cpu(opt):
    expected = weights(two_fits(small(opt=opts[opt])))
    assert_same(weights(two_fits(small({}, opts[opt]), part)), expected)

@pytest.mark.parametrize('trip', [whole, there_and_back])
def test_a_callback_may_take_the_model_to_the_cpu_between_epochs(trip):
    def run(xla=None):
        learn = small(xla, cbs=[AtEpochEnd(trip)])
        with learn.no_logging(): learn.fit(2, 1e-2)
        return learn
    expected,got = run(),run({})
    assert_same(weights(got), weights(expected))
    assert_same([tensor(got.recorder.values)], [tensor(expected.recorder.values)])

def test_frozen_parameters_are_as_frozen_after_a_trip_to_the_cpu():
    "fastai goes on stepping a parameter whose gradient is zeros, by weight decay and momentum"
    def run(xla=None):
        learn = small(xla)
        with learn.no_logging():
            learn.fit(1, 1e-2)
            learn.freeze()
            learn.model.cpu()
            learn.fit(1, 1e-2)
        return learn
    assert_same(weights(run({})), weights(run()))

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp,self.a,self.b = nn.Sequential(Flatten(), nn.Linear(64, 8)),nn.Linear(8, 8),nn.Linear(8, 8)
        self.b.weight = self.a.weight
    def forward(self, x): return self.b(self.a(self.inp(x)).relu())

def test_tied_weights_are_tied_after_a_trip_to_the_cpu():
    def run(xla=None): return two_fits(small(xla, model=Tied, splitter=params), whole)
    got = run({})
    assert got.model.a.weight is got.model.b.weight
    assert_same(weights(got), weights(run()))

@pytest.mark.parametrize('opt', ['adam', 'torch_adam'])
def test_detaching_with_a_part_on_the_cpu_keeps_its_optimizer_state(opt):
    expected = weights(two_fits(small(opt=opts[opt])))
    def leave(learn):
        part(learn)
        learn.detach_xla()
    assert_same(weights(two_fits(small({}, opts[opt]), leave)), expected)

def test_gradient_hooks_survive_a_trip_to_the_cpu():
    learn,n = small(dict(replay=False)),[]
    learn.model[0][1].weight.register_hook(lambda g: n.append(1))
    two_fits(learn, whole)
    assert len(n) == 8

@pytest.mark.parametrize('opt', ['adam', 'torch_adam'])
def test_a_new_head_leaves_the_body_its_optimizer_state(opt):
    learn = small({}, opts[opt])
    with learn.no_logging(): learn.fit(1, 1e-2)
    inner = lambda: getattr(learn.opt, 'opt', learn.opt).state
    body = list(learn.model[0].parameters())
    was = [inner()[p] for p in body]
    learn.model[1][0] = nn.Linear(8, 4)
    with learn.no_logging(): learn.fit(1, 1e-2)
    assert all(inner()[p] is s for p,s in zip(body, was))
    assert [int(inner()[p]['step']) for p in learn.model.parameters()] == [8]*2 + [4]*2
