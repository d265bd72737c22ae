"compare_models, trainable_params, check_training and compare_backends: what is found, with its name, and what is left as it was"
import subprocess, sys
from types import SimpleNamespace
from copy import deepcopy
import own_process, pytest, torch
from fastai.vision.all import *
from fastai.callback.all import *
from fastai.text.all import AWD_LSTM, LMLearner, get_language_model
from common import *
from planted import frozen
from fastai_xla.all import *
from fastai_xla.transfer import fetch
from fastai_xla.lowerings.all import without_lowerings
from fastai_xla.optim import SAM
from fastai_xla.parity.models import *
from fastai_xla.parity.truth import *
from fastai_xla.parity.backends import *

# compare_models

def test_equal():
    a = convnet()
    b = deepcopy(a)
    assert not compare_models(a, b) and 'match' in str(compare_models(a, b))

@pytest.mark.parametrize('name,change,column', [
    ('1.3.weight', lambda m: m[1][3].weight.data[2].add_(.5), 'value'),
    ('0.0.1.running_mean', lambda m: m[0][0][1].running_mean.fill_(2.), 'value'),
    ('1.3.bias', lambda m: m[1][3].bias.data[1:2].fill_(float('nan')), 'value'),
    ('0.0.1.num_batches_tracked', lambda m: m[0][0][1].num_batches_tracked.add_(7), 'value')])
def test_one_difference(name, change, column):
    a = convnet()
    b = deepcopy(a)
    change(b)
    c = compare_models(a, b)
    assert (list(c.table.index) == [name] and c.table.difference[name] > 0
            and f'1 in {column}' in c.verdict and c._repr_html_().count('<tr') >= 2)

def test_device_type_shape():
    a = convnet()
    b = deepcopy(a)
    b[1][3].half()
    b[0].to(device())
    b[1][0][0].weight = nn.Parameter(torch.zeros(8, 8, 1, 1))
    t = compare_models(a, b).table
    assert (t.loc['1.3.weight', 'dtype'] == 'float32 | float16'
            and t.loc['0.0.0.weight', 'device'] == 'cpu | xla:0' and '|' in t.loc['1.0.0.weight', 'shape'])
    assert t.difference['0.0.0.weight'] == 0 and '1.0.1.weight' not in t.index

def test_names():
    with pytest.raises(ValueError, match='only in the first: 1.3.weight, 1.3.bias'):
        compare_models(convnet(), nn.Sequential(convnet()[0], convnet()[1][:3]))

def test_tolerance():
    a = nn.Linear(2, 2)
    b = deepcopy(a)
    b.weight.data[0,0] += 1e-4
    assert compare_models(a, b, tol=1e-5) and not compare_models(a, b, tol=1e-3)

# trainable_params

def test_trainable_params():
    learn = image_learner()
    assert 'No optimizer yet' in str(trainable_params(learn))
    learn.create_opt()
    assert not 'not the model' in str(trainable_params(learn)) and trainable_params(learn).table.loc['the optimizer', 'of_the_model'] == 8
    learn.model = convnet()
    t = trainable_params(learn)
    assert (t.table.loc['the optimizer', 'not_of_the_model'] == 8
            and t.table.loc['a new optimizer (create_opt)', 'of_the_model'] == 8 and 'create_opt' in t.verdict)
    assert trainable_params(learn.model) == list(learn.model.parameters())

# check_training

def sound(xla=False, **kwargs):
    learn = image_learner(**kwargs).remove_cb(ProgressCallback)
    return learn.to_xla() if xla else learn

@pytest.mark.parametrize('xla', [False, True])
@pytest.mark.parametrize('kwargs', [{}, dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), dict(cbs=SAM()),
                                    dict(opt_func=ranger)], ids=['adam', 'wrapped', 'sam', 'ranger'])
def test_sound(kwargs, xla):
    c = check_training(sound(xla, **kwargs))
    assert not c, c

def unused(learn): learn.model[1][3].extra = nn.Parameter(torch.ones(2))
def new_head(learn):
    learn.create_opt()
    learn.model[1][3] = nn.Linear(8, 4)
def no_lr(learn): learn.lr = 0.

@pytest.mark.parametrize('plant,names,reason', [(unused, ['1.3.extra'], 'does not depend on it'),
                                                (new_head, ['1.3.weight', '1.3.bias'], 'call `learn.create_opt'),
                                                (no_lr, None, 'learning rate')])
def test_planted(plant, names, reason):
    "More in test_planted.py"
    learn = sound()
    plant(learn)
    c = check_training(learn)
    every = [n for n,_ in learn.model.named_parameters()]
    assert c and c.table.reason.str.contains(reason, regex=False).all(), c
    assert list(c.table.index) == (names or every) or (plant is no_lr and set(c.table.index) <= set(every) and len(c.table) >= 6)

def test_healed_by_to_xla():
    learn = sound()
    learn.create_opt()
    assert not check_training(learn.to_xla())

def test_frozen_on_purpose():
    learn = sound()
    learn.freeze()
    c = check_training(learn)
    assert not c and 'frozen by `learn.freeze()`' in str(c)
    learn = sound()
    frozen(learn)
    assert not check_training(learn, frozen=('1.3.',))

class EvalBN(Callback):
    def before_batch(self): self.model[0][0][1].eval()

def test_historic_crash():
    learn = sound(True, cbs=EvalBN())
    with without_lowerings('batch_norm'): c = check_training(learn)
    assert c and 'offset factor is 0' in str(c)
    assert not check_training(learn)
    with learn.no_logging(): learn.fit(1)

opts = dict(adam=Adam, ranger=ranger, wrapped=partial(OptimWrapper, opt=torch.optim.Adam))

@pytest.mark.parametrize('opt,xla', [('adam', False), *((o, xla) for o in ('ranger', 'wrapped') for xla in (False, True))])
def test_nothing_lost(opt, xla):
    """Weights, statistics, optimizer and batches of a learner that is checked between fits are those of one that is not

    `ranger` is an optimizer of fastai's around another, so that what there is of Adam is part of it"""
    def run(check):
        set_seed(0, reproducible=True)
        learn = sound(xla, opt_func=opts[opt])
        for _ in range(2):
            if check: check_training(learn)
            with learn.no_logging(): learn.fit(1, 1e-2)
        return learn
    a,b = run(False),run(True)
    assert not compare_models(a, b)
    state = lambda l: [t for p in l.model.parameters() for o in (l.opt, getattr(l.opt, 'opt', None)) if o is not None
                       for _,t in sorted((k, v) for k,v in o.state.get(p, {}).items() if isinstance(v, torch.Tensor))]
    assert all(torch.equal(x, y) for x,y in zip(fetch(state(a)), fetch(state(b)))) and len(state(a)) == len(state(b))
    assert [type(c) for c in a.cbs] == [type(c) for c in b.cbs] and a.recorder.values == b.recorder.values

# compare_backends

def tanh_learner():
    x = torch.randn(64, 8)
    dl = DataLoader(list(zip(x, (x[:,:1]*x[:,1:2]).sin())), bs=32, shuffle=True, num_workers=0)
    return Learner(DataLoaders(dl, dl), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)),
                   loss_func=MSELossFlat(), opt_func=partial(SGD, mom=.9), cbs=SAM())

def wrong_tanh(eps): return lambda g, y: g*(1-y*y)*(1+eps)

def test_rounding():
    r = compare_backends(tanh_learner, ('cpu', 'xla', 'meta-device-that-is-not'), n_epoch=10, lr=.1)
    assert not r and r.verdicts == dict(cpu='rounding', xla='rounding') and 'it fails' in str(r) and len(r.losses['float64']) == 20
    assert r.plot() and '<table' in r._repr_html_()

@pytest.mark.parametrize('backend', ['cpu', 'xla'])
def test_fault(backend):
    with swap_op('aten.tanh_backward', backend, wrong_tanh(1e-4)):
        r = compare_backends(tanh_learner, ('cpu', 'xla'), n_epoch=5, lr=.1, roundings=2)
    assert list(r.parted) == [backend] and r.parted[backend] <= 4 and f'{backend} has a fault' in str(r)

def test_batch_norm_and_adam():
    def make():
        return Learner(image_dls(), nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(.5),
                                                  nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(4, 4)), loss_func=CrossEntropyLossFlat())
    assert not compare_backends(make, ('cpu', 'xla'), n_epoch=2, lr=1e-2, seed=1)

def test_language_model():
    "Tied weights, and fastai's `WeightDropout`, which takes parameters out of a module and puts others in"
    def make():
        x = torch.randint(20, (16, 6))
        dl = DataLoader(list(zip(x, x.roll(-1, 1))), bs=8, num_workers=0)
        sizes = dict(emb_sz=6, n_hid=8, n_layers=1, pad_token=1, bidir=False, output_p=.1,
                     hidden_p=.1, input_p=.1, embed_p=.1, weight_p=.1, tie_weights=True, out_bias=True)
        return LMLearner(DataLoaders(dl, dl), get_language_model(AWD_LSTM, 20, config=sizes), loss_func=CrossEntropyLossFlat())
    r = compare_backends(make, ('cpu', 'xla', 'xla-replay'), n_epoch=2, lr=1e-2, roundings=2)
    assert r.verdicts == dict.fromkeys(('cpu', 'xla', 'xla-replay'), 'rounding') and not r.left_out, r

def curve(eps, jump=0.):
    return SimpleNamespace(losses=[1+eps*s+jump*(s > 3) for s in range(12)],
                           weights={s: np.ones(4)*(1+eps*s+jump*(s > 3)) for s in range(12)})

@pytest.mark.parametrize('rough,fault', [([], True), ([curve(1e-6), curve(1e-6, .5e-3)], False), ([curve(1e-6), curve(1e-6)], True)],
                         ids=['none', 'jumps too', 'smooth'])
def test_jump_of_a_relu(rough, fault):
    "A unit at zero that rounding lets through or not: a fault, unless larger roundings jump as well"
    r = BackendRuns(dict(float64=Truth(curve(0.), [curve(1e-7)], rough)), dict(xla='float64'), dict(xla=curve(1e-7, 1e-3)), {}, 12)
    assert bool(r) == fault

def test_not_made_anew():
    model,learn = nn.Linear(8, 1),tanh_learner()
    with pytest.raises(ValueError, match='other weights'):
        compare_backends(lambda: Learner(tanh_learner().dls, model, loss_func=MSELossFlat(), opt_func=SGD), ('cpu',), lr=.1, roundings=1)

def test_other_batches():
    seeds = iter(range(100))
    def make():
        learn = tanh_learner()
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(next(seeds)))
        dl = DataLoader(list(zip(x, x[:,:1])), bs=32, num_workers=0)
        learn.dls = DataLoaders(dl, dl)
        return learn
    with pytest.raises(ValueError, match='other batches'): compare_backends(make, ('cpu',), lr=.1, roundings=1)

script = '''
from fastai.basics import *
def make_learner():
    x = torch.randn(64, 3)
    dl = DataLoader(list(zip(x, x.sum(1, keepdim=True))), bs=16, num_workers=0)
    return Learner(DataLoaders(dl, dl), nn.Linear(3, 1), loss_func=MSELossFlat(), opt_func=SGD)
'''

def test_cli(tmp_path):
    (tmp_path/'train.py').write_text(script)
    (tmp_path/'run.py').write_text('from fastai_xla.parity.backends import parity_cli\nparity_cli()')   # as the console script does
    res = own_process.run(['-m', 'run', 'train.py', '--epochs', '2', '--backends', 'cpu,xla', '--out', 'p'], tmp_path, tmp_path)
    assert res.returncode == 0, res.stderr
    assert 'rounding' in res.stdout and (tmp_path/'p.png').stat().st_size > 1000 and len((tmp_path/'p.csv').read_text().splitlines()) == 9
    with pytest.raises(SystemExit, match='There is no file'): parity_cli(str(tmp_path/'none.py'))

without = '''
import sys
sys.modules['torch_xla'] = None
from fastai.basics import *
from fastai_xla.parity.models import *
from fastai_xla.parity.backends import *
from fastai_xla.parity.locate import *
from fastai_xla.optim import SAM
from fastai_xla.seeds import manual_seed
manual_seed(1), set_seed(1)
with no_random(): torch.rand(1)
def learner():
    x = torch.randn(64, 3)
    dl = DataLoader(list(zip(x, x.sum(1, keepdim=True))), bs=16, num_workers=0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return Learner(DataLoaders(dl, dl), model, loss_func=MSELossFlat(), opt_func=SGD, cbs=SAM())
assert not check_training(learner())
assert compare_models(nn.Linear(2, 2), nn.Linear(2, 2))
r = compare_backends(learner, ('cpu', 'xla'), lr=.1)
assert not r and 'torch_xla is not installed' in str(r), r
assert not locate_fault(learner())
learn = learner()
learn.model[1].forward = lambda x: x.tanh() if x.dtype == torch.float64 else x.tanh()*1.001
f = locate_fault(learn)
assert f and (f.path, f.phase, f.backend) == ('1', 'forward', 'cpu'), f
print('ALL WELL')
'''

def test_without_torch_xla():
    res = subprocess.run([sys.executable, '-c', without], capture_output=True, text=True)
    assert 'ALL WELL' in res.stdout, res.stderr
