"Ways onto the device other than `to_xla`, and tensors that meet from both sides, train or say what to type"
import os, pickle, warnings
from copy import deepcopy
import numpy as np, pytest, torch
import torch.nn.functional as F
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.transfer import fetch
import own_process
from common import *

def mlp(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
def learner(model=None, n=4*8, n_valid=2*8, **kwargs):
    kwargs = dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=SGD) | kwargs
    return Learner(image_dls(n=n, n_valid=n_valid, bs=8, shuffle=False), model or mlp(), **kwargs).remove_cb(ProgressCallback)

def fitted(learn, n=1):
    "What a fit warns of"
    with warnings.catch_warnings(record=True) as ws, learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(n, .1)
    return [str(w.message) for w in ws if issubclass(w.category, UserWarning)]

# Training there without to_xla

moves = dict(dls=lambda l: l.dls.to(device()), model=lambda l: l.model.to('xla'), both=lambda l: (l.dls.to('xla'), l.model.to('xla')))

@pytest.mark.parametrize('how', moves)
def test_training_there_without_to_xla_is_told_once(how):
    learn = learner(n=8, n_valid=8)
    moves[how](learn)
    said = [w for w in fitted(learn) if 'without `learn.to_xla()`' in w]
    assert len(said) == 1
    assert ('the graph of each holds those of all before it' in said[0]) == (how != 'model')
    assert len(learn.recorder.losses) == 1

@pytest.mark.parametrize('move', [noop, lambda l: l.to_xla(), lambda l: l.to_xla().detach_xla()], ids=['cpu', 'to_xla', 'detached'])
def test_other_learners_are_not_told(move):
    learn = learner(n=8, n_valid=8)
    move(learn)
    assert not fitted(learn)

def test_to_xla_after_a_move_by_hand_trains():
    learn = learner(n=8, n_valid=8)
    moves['both'](learn)
    learn.to_xla()
    before = fetch(deepcopy(learn.model.state_dict()))
    assert not fitted(learn)
    assert all((v-before[k]).abs().max() > 0 for k,v in fetch(learn.model.state_dict()).items())

# A tensor on the CPU

def test_model_that_is_given_a_batch_on_the_cpu():
    learn = learner().to_xla()
    x = torch.randn(3, 1, 8, 8)
    for f in (learn.model, lambda x: learn.model[1](x.flatten(1))):
        with pytest.raises(RuntimeError, match=r'(?s)Expected XLA tensor.*was given a tensor on the '
                                               r'CPU.*learn\.model\(x\.to\(learn\.xla_opt\.device\)\).*get_preds.*detach_xla') as e:
            f(x)
        assert type(e.value.__cause__) is RuntimeError and 'XLA tensor' in str(e.value.__cause__)
    assert learn.model(x.to(learn.xla_opt.device)).shape == (3, 4)
    learn.detach_xla()
    assert learn.model(x).shape == (3, 4)

def test_convolution_that_is_given_a_batch_on_the_cpu():
    "Its error is torch's own, of another text"
    learn = image_learner(image_dls(n=16, n_valid=16)).to_xla()
    with pytest.raises(RuntimeError, match='(?s)Sequential is on XLA and was given a tensor on the CPU'):
        learn.model(torch.randn(2, 1, 8, 8))

def test_other_errors_stay_as_they_are():
    learn = learner().to_xla()
    with pytest.raises(RuntimeError) as e: learn.model(torch.randn(2, 1, 7, 7).to(device())).sum().item()
    assert 'on the CPU' not in str(e.value)

def test_weighted_loss_of_predictions_on_the_cpu():
    learn = learner(loss_func=CrossEntropyLossFlat(weight=torch.tensor([1.,2.,3.,4.]))).to_xla()
    preds,targs,losses = learn.get_preds(with_loss=True)
    logits = preds.log()   # the loss's activation has been applied; cross entropy does not mind
    with pytest.raises(RuntimeError, match='CrossEntropyLoss is on XLA and was given a tensor on the CPU.*learn.loss_func'):
        learn.loss_func(logits, targs)
    there = learn.loss_func(*(o.to(learn.xla_opt.device) for o in (logits, targs)))
    learn.detach_xla()
    assert there.item() == pytest.approx(learn.loss_func(logits, targs).item(), rel=1e-5)

class Placed(Module):
    def __init__(self): self.lin = nn.Linear(64, 4)
    def forward(self, x):
        turn = torch.eye(4)
        return self.lin(x.flatten(1)) @ turn

def test_model_that_makes_a_tensor_on_the_cpu():
    "From the model, and from a fit"
    learn = learner(nn.Sequential(Placed())).to_xla()
    line = Placed.forward.__code__.co_firstlineno + 2
    for f in (lambda: learn.model(torch.randn(2, 1, 8, 8).to(device())), lambda: fitted(learn)):
        with pytest.raises(RuntimeError, match=rf'meets a tensor on the CPU in .*test_doors.py, line {line}\..*device=x.device'): f()

class Positions(Module):
    "As ACmix, which asks `x.is_cuda` where to make them"
    def __init__(self, kind, n): self.conv,self.lin,self.n = getattr(nn, f'{kind}{n}d')(1, 1, 1),nn.Linear(64, 4),n
    def forward(self, x):
        return self.lin(x.flatten(1) + self.conv(torch.linspace(0, 1, 64).view(1, 1, *[1]*(self.n-1), 64)).flatten())

@pytest.mark.parametrize('kind', ['Conv', 'ConvTranspose'])
@pytest.mark.parametrize('n', [1, 2, 3])
@pytest.mark.parametrize('f', [torch.no_grad, torch.enable_grad])
def test_convolution_of_a_tensor_on_the_cpu_within_a_model(kind, n, f):
    "It ran on the CPU without a word, and the backward pass failed"
    learn = learner(Positions(kind, n)).to_xla()
    with f(), pytest.raises(RuntimeError, match='meets a tensor on the CPU in .*test_doors.py'):
        learn.model(torch.randn(2, 1, 8, 8).to(device()))

class Placing(nn.Module):
    "A loss that brings its weights where the batch is, as those of metric learning do"
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
    def forward(self, p, t):
        self.w.data = self.w.data.to(p.device)
        return F.cross_entropy(p*self.w, t)

def test_loss_that_moves_its_weights_itself():
    loss = Placing()
    learn = learner(loss_func=lambda p,t: loss(p, t)).to_xla()
    with pytest.raises(RuntimeError, match=r"(?s)incompatible tensor type.*test_doors.py.*`loss.to\('xla'\)` before the fit"): fitted(learn)
    loss.to('xla')
    assert not fitted(learn)

def test_explanations_are_seen_nowhere():
    "In a state dict, a copy, a pickle or an export, and on a model that has left"
    learn,plain = learner().to_xla(),learner()
    assert [*learn.model.state_dict()] == [*plain.model.state_dict()]
    x = torch.randn(2, 1, 8, 8)
    for m in (deepcopy(learn.model), pickle.loads(pickle.dumps(learn.model.cpu()))):
        assert not any('_compiled_call_impl' in vars(o) for o in m.modules())
        assert m.cpu()(x).shape == (2, 4)
    learn.detach_xla()
    assert [[*vars(o)] for o in learn.model.modules()] == [[*vars(o)] for o in plain.model.modules()]

# Everything made there

defaulted = '''
from fastai.vision.all import *
from fastai_xla.all import *
from common import *
def learner():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    return Learner(image_dls(n=16, n_valid=16, bs=8), model, loss_func=CrossEntropyLossFlat()).remove_cb(ProgressCallback)
def said(f):
    try: f()
    except RuntimeError as e: return "torch.set_default_device('cpu')" in str(e)
late,learn = learner().to_xla(),learner()
torch.set_default_device('xla')
assert said(learn.to_xla) and said(lambda: late.fit(1)) and said(late.validate)
torch.set_default_device('cpu')
with torch.device('xla'): assert said(learn.to_xla)
for l in (late, learn.to_xla()):
    with l.no_logging(): l.fit(1)
    assert l.get_preds()[0].shape == (16, 4)
    assert not [c for c in l.xla_report().costs.values() if c.fallbacks]
print('TRAINED')
'''

def test_xla_as_the_default_device_is_refused(tmp_path):
    res = own_process.run(['-c', defaulted], tmp_path, Path(__file__).parent)
    assert res.returncode == 0 and 'TRAINED' in res.stdout, res.stdout+res.stderr

# Metrics in numpy

def error_np(p, t): return (p.numpy().argmax(1) != np.asarray(t)).mean()
def error_one(p, t): return torch.tensor(float((np.array(p).argmax(1) != t.numpy()).mean()))

@pytest.mark.parametrize('replay', ['auto', False])
def test_metric_in_numpy(replay):
    "As on the CPU, beside others that stay in the step, told once"
    def make():
        set_seed(0)
        return learner(metrics=[error_np, accuracy, error_one])
    cpu,learn = make(),make().to_xla(replay=replay)
    fitted(cpu, 3)
    said = fitted(learn, 3)
    assert len(said) == 2 and 'The metric error_np computes with numpy' in said[0] and 'AccumMetric' in said[0] and 'error_one' in said[1]
    assert [list(v) for v in learn.recorder.values] == [pytest.approx(list(v), rel=1e-4) for v in cpu.recorder.values]
    for a,b in zip(fetch(learn.model.state_dict()).values(), cpu.model.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    if replay:
        assert ('the metric error_np, with numpy on the host' in str(learn.xla_report())
                and learn.xla_report().per_batch('training')['to host'] == 0)
    assert learn.validate()[1] == pytest.approx(cpu.validate()[1])

def test_steps_beside_a_metric_in_numpy_are_replayed():
    learn = learner(metrics=error_np).to_xla()
    fitted(learn, 4)
    assert sum(learn.xla_opt.replay.fit.plain.values()) <= 1
    cost = learn.xla_report().per_batch('validation')
    assert (cost['executions'], cost['compiles'], cost['to host']) == (1, 0, 1)

def test_accumulated_metric_in_numpy():
    met = AccumMetric(lambda p, t: (p == t).mean(), dim_argmax=-1, to_np=True, name='same')
    learn = learner(metrics=[met, accuracy]).to_xla()
    assert not fitted(learn)
    assert learn.recorder.values[-1][2] == pytest.approx(learn.recorder.values[-1][3])

def test_other_errors_of_a_metric_stay_as_they_are():
    def wrong(p, t): raise TypeError('of its own')
    with pytest.raises(TypeError, match='of its own'): fitted(learner(metrics=wrong).to_xla())

# Random crops without a size

def test_random_crops_without_a_size():
    "Each batch has the shape of its crop, as on the CPU, and the user is told what that costs"
    def make():
        set_seed(0)
        dls = image_dls(n=4*8, n_valid=8, bs=8, size=12,
                        after_batch=aug_transforms(min_scale=.4, max_rotate=0, max_zoom=1, max_warp=0, max_lighting=0, do_flip=False))
        return Learner(dls, nn.Sequential(ConvLayer(1, 4), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(4, 4)),
                       loss_func=CrossEntropyLossFlat(), opt_func=SGD).remove_cb(ProgressCallback)
    class Shapes(Callback):
        def before_fit(self): self.seen = []
        def after_batch(self): self.seen.append(tuple(self.x.shape))
    cpu,learn = make(),make().to_xla()
    there,here = Shapes(),Shapes()
    for l,cb in ((cpu, there), (learn, here)):
        random.seed(1)
        with l.added_cbs(cb): said = fitted(l)
    assert here.seen == there.seen and len(set(here.seen)) > 2
    assert any('Random crops without a size' in w for w in said)
