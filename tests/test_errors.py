"Bad input gets an error that says what happened, why on XLA, and what to type instead; and nothing is lost"
import os, re, subprocess, sys, warnings
import numpy as np, pytest, torch
from fastai.vision.all import *
from fastai_xla import runtime
from fastai_xla.all import *
import own_process
from common import *

def run(code, **env):
    res = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=Path(__file__).parent, env=os.environ | env)
    return res.returncode,res.stdout+res.stderr

def forked(code, tmp_path):
    res = own_process.run(['-c', code], tmp_path, Path(__file__).parent)
    return res.returncode,res.stdout+res.stderr

pretend = '''
import importlib.metadata as metadata, sys
real = metadata.version
def version(name):
    if name == 'torch_xla':
        if {version!r} is None: raise metadata.PackageNotFoundError(name)
        return {version!r}
    return real(name)
metadata.version = version
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch_xla', '_XLAC'): raise ImportError(f'undefined symbol in {{name}}')
sys.meta_path.insert(0, Block())
from fastai.vision.all import *
from fastai_xla.all import *
from common import *
learn = image_learner().remove_cb(ProgressCallback)
with learn.no_logging(): learn.fit(1)
print('TRAINED ON', learn.dls.device)
learn.to_xla()
'''

@pytest.mark.parametrize('version,said', [(None, 'torch_xla is not installed'), ('2.8.0', 'do not match'), ('2.9.0', 'does not load')])
def test_torch_xla_missing_or_wrong(version, said):
    "fastai goes on working; to_xla tells what to install"
    rc,out = run(pretend.format(version=version))
    assert rc == 1 and 'TRAINED ON cpu' in out and 'ImportError' in out
    assert said in out and "pip install 'torch==2.9.*' 'torchvision==0.24.*' 'torch_xla==2.9.*'" in out

asked = "from fastai_xla.runtime import *\nfor _ in range(2):\n  try: device()\n  except RuntimeError as e: print('TOLD', e)"
# a libtpu without a TPU would ask the cloud's metadata server for minutes
no_metadata = dict(TPU_SKIP_MDS_QUERY='1')
# torch_xla in this process has told its children where libtpu is
without_libtpu = """
import os, sys
for k in ('TPU_LIBRARY_PATH', 'PTXLA_TPU_LIBRARY_PATH'): os.environ.pop(k, None)
sys.modules['libtpu'] = None
"""

@pytest.mark.parametrize('device,before,said,not_said', [
    ('TPU', '', ['this machine has no TPU', 'a TPU serves one at a time'], ['pip install', 'GPU']),
    ('TPU', without_libtpu, ['libtpu, which is not installed', "pip install 'fastai_xla[tpu]'"], ['this machine has no TPU', 'GPU']),
    ('CUDA', '', ['has no client for CUDA', 'On a GPU fastai trains as it is: leave out `to_xla()`'],
     ['pip install', 'this machine has no TPU'])],
    ids=['no TPU', 'no libtpu', 'CUDA'])
def test_client_does_not_start(device, before, said, not_said):
    "The cure is that of the cause, twice the same, and how to go on without a TPU"
    rc,out = run(before + asked, PJRT_DEVICE=device, **no_metadata)
    assert rc == 0 and out.count(f'TOLD The XLA client did not start (PJRT_DEVICE={device})') == 2 and 'PJRT_DEVICE=CPU' in out
    assert all(out.count(o) == 2 for o in said) and not any(o in out for o in not_said), out

trap = '''
import torch, warnings
w = torch.ones(3, requires_grad=True)
(w*2).sum().backward()
from fastai.vision.all import *
from fastai_xla.all import *
import fastai_xla.transfer as transfer
from common import *
if {incurable}: torch.autograd.set_multithreading_enabled = lambda on: None
learn = image_learner().remove_cb(ProgressCallback).to_xla()
before = transfer.fetch(learn.model[0][0][0].weight.clone())
with learn.no_logging(): learn.fit(1, 1e-2)
assert (transfer.fetch(learn.model[0][0][0].weight.detach())-before).abs().max() > 0
print('TRAINED')
'''

def test_trap_is_cured(tmp_path):
    rc,out = forked(trap.format(incurable=False), tmp_path)
    assert (rc == 0 and 'TRAINED' in out and 'ran a .backward() before the XLA device existed' in out
            and 'set_multithreading_enabled(False)' in out)

def test_trap_without_cure(tmp_path):
    rc,out = forked(trap.format(incurable=True), tmp_path)
    assert rc == 1 and 'TRAINED' not in out
    assert ('RuntimeError: This process ran a .backward() before the XLA device existed' in out
            and 'Restart the notebook and put `from fastai_xla.all import *` into its first cell' in out)

def quiet(**kwargs): return image_learner(**kwargs).remove_cb(ProgressCallback)

def test_other_device():
    learn = quiet()
    with pytest.raises(ValueError, match=r"to_xla\('cuda'\).*learn.dls.to\('cuda'\)"): learn.to_xla('cuda')
    with pytest.raises(ValueError, match=r'There is no XLA device 7: this process has 1.*to_xla\(devices=7\)'): learn.to_xla(7)
    with pytest.raises(ValueError, match=r"to_xla\('TPU:0'\): PyTorch calls a TPU 'xla'. Type `learn.to_xla\(\)`.*here: CPU"):
        learn.to_xla('TPU:0')
    with pytest.raises(ValueError, match=r"to_xla\('bogus'\): this call takes an XLA device"): learn.to_xla('bogus')
    assert not hasattr(learn, 'xla_opt')
    with learn.no_logging(): learn.fit(1)

def test_no_dls():
    learn = quiet()
    learn.dls = None
    with pytest.raises(ValueError, match='no DataLoaders.*learn.dls.*to_xla'): learn.to_xla()

def test_told_to_stay_on_the_cpu():
    learn = quiet()
    default_device(False)
    try:
        with pytest.raises(ValueError, match=r'default_device\(None\)'): learn.to_xla()
    finally: default_device(None)
    learn.to_xla()

def test_report_before_to_xla():
    with pytest.raises(RuntimeError, match=r'learn.to_xla\(\)'): quiet().xla_report()

def test_report_before_a_fit():
    report = quiet().to_xla().xla_report()
    assert report.empty and report.clean
    for said in (repr(report), report._repr_html_()):
        assert 'Nothing has been trained here since `learn.to_xla()`' in said and 'batches' not in said

def test_report_of_a_learner_that_has_left():
    "The last fit's on XLA, until there is another; not in what is exported"
    learn = quiet().to_xla()
    with learn.no_logging(): learn.fit(1)
    there = repr(learn.xla_report())
    learn.detach_xla()
    assert 'training' in there and repr(learn.xla_report()) == there
    assert not any('XLAReport' in type(v).__name__ for v in vars(learn).values())
    with learn.no_logging(): learn.fit(1)
    assert repr(learn.xla_report()) == there
    with learn.to_xla().no_logging(): learn.fit(2)
    assert learn.xla_report().log.batches['training'] == 16

def test_coverage_of_no_group(capsys):
    from fastai_xla.coverage import coverage, coverage_cli
    with pytest.raises(ValueError, match="no group 'bogus'.*The groups: model, augmentation"): coverage(['bogus'])
    with pytest.raises(SystemExit, match="no group 'bogus'"): coverage_cli('bogus')

def test_one_is_singular():
    assert repr(runtime.XLACounts(1, 1)).startswith('1 compile (0.00 s), 1 execution, ')
    assert repr(runtime.XLACounts(2)).startswith('2 compiles (0.00 s), 0 executions, ')

class Arrays:
    def __len__(self): return 32
    def __getitem__(self, i): return np.ones((1, 8, 8), dtype=np.float32),i%4

@pytest.mark.parametrize('collate', [lambda b: (np.stack([x for x,_ in b]), torch.tensor([y for _,y in b])),
                                     lambda b: (['a name']*len(b), torch.tensor([y for _,y in b]))], ids=['array', 'names'])
def test_batch_is_no_tensor(collate):
    dl = DataLoader(Arrays(), bs=16, create_batch=collate)
    learn = Learner(DataLoaders(dl, dl), convnet(), loss_func=CrossEntropyLossFlat()).remove_cb(ProgressCallback).to_xla()
    said = r'(numpy.ndarray|builtins.list|builtins.str) where a tensor is expected.*ToTensor'
    with pytest.raises(TypeError, match=said), learn.no_logging(): learn.fit(1)
    learn.dls = image_dls()
    with learn.no_logging(): learn.fit(1)

class Nan(nn.Module):
    def __init__(self): super().__init__(); self.net = convnet()
    def forward(self, x): return self.net(x)*float('nan')

def test_nan_from_the_first_step():
    learn = Learner(image_dls(), Nan(), loss_func=CrossEntropyLossFlat()).remove_cb(ProgressCallback).to_xla()
    with pytest.warns(UserWarning, match='The loss is nan from step 0 of this fit on.*TerminateOnNaNCallback') as told, learn.no_logging():
        learn.fit(2)
    assert len([w for w in told if 'The loss is nan' in str(w.message)]) == 1
    assert len(learn.recorder.losses) == 16

def test_no_such_warning_otherwise(recwarn):
    learn = quiet().to_xla()
    with learn.no_logging(): learn.fit(1)
    assert not [w for w in recwarn if 'The loss is' in str(w.message)]

def test_settings_of_torch_xla_without_our_functions(monkeypatch):
    "Another torch_xla, without the two switches for scalars: a warning that says what follows, and it trains"
    import fastai_xla.runtime as runtime
    class Other: pass
    monkeypatch.setattr(runtime, '_XLAC', Other())
    with pytest.warns(UserWarning, match='steps may recompile when a hyper-parameter passes 0 or 1'): runtime._scalars_as_data()

def test_third_shape():
    "The third shape of a batch is told, with cause and cure, once; the second, of a smaller last batch, is normal"
    def sizes(n):
        dl = DataLoader(list(range(8)), bs=2, create_batch=lambda b: (torch.randn(4, 1, 8+(b[0]//2)%n, 8), torch.zeros(4).long()))
        return Learner(DataLoaders(dl, dl), convnet(), loss_func=CrossEntropyLossFlat()).remove_cb(ProgressCallback).to_xla()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        two,three = sizes(2),sizes(4)
        with two.no_logging(): two.fit(1)
        assert not [w for w in told if 'three shapes' in str(w.message)]
        with three.no_logging(): three.fit(2)
    told = [str(w.message) for w in told if 'three shapes' in str(w.message)]
    assert len(told) == 2 and 'Resize(size)' in told[0]    # training and validation

def test_to_xla_arguments(tmp_path):
    "A cache that this device's compiler cannot read back is told; steps are run together only where they are replayed"
    with pytest.warns(UserWarning, match='cannot read them back'): learn = image_learner().to_xla(cache=tmp_path)
    with learn.no_logging(): learn.fit(1)
    for kw in (dict(steps_per_execution=0), dict(steps_per_execution=8, replay=False)):
        with pytest.raises(ValueError, match='steps_per_execution'): image_learner().to_xla(**kw)
    with pytest.raises(ValueError, match="this takes 'auto'"): image_learner().to_xla(replay='audit')

def test_cache_probe(tmp_path, tmp_path_factory):
    """Elsewhere than on a CPU, the second process with a folder knows whether programs can be read back

    The compiler for the CPU stands for one that cannot"""
    code = f"""import fastai_xla.graphs as r
r.device()
r.torch_xla.runtime.device_type = lambda: 'TPU'
print('why:', r.use_cache({str(tmp_path)!r}), '|', r.use_cache({str(tmp_path)!r}), '|', r.use_cache('elsewhere'), '.')"""
    (_,first),(_,second) = forked(code, tmp_path_factory.mktemp('out')),forked(code, tmp_path_factory.mktemp('out'))
    assert 'why:  |  | other programs have been compiled' in first and list(tmp_path.iterdir())
    assert 'why: this version of torch_xla cannot read back' in second

def test_replay_warns():
    "`replay=True` warns of what it cannot record, 'auto' leaves it to the report"
    class Reads(Callback):
        def after_loss(self): self.seen = self.loss.item()
    learn = image_learner(cbs=Reads()).to_xla(replay=True)
    with learn.no_logging(), pytest.warns(UserWarning, match='reads a value within the step'): learn.fit(1)
    assert 'retraced' in repr(learn.xla_report()) and 'reads a value within the step' in repr(learn.xla_report())
    learn = image_learner(cbs=Reads()).to_xla()
    with learn.no_logging(), warnings.catch_warnings():
        warnings.filterwarnings('error', message='Steps of this kind cannot be replayed')
        learn.fit(1)

class CannotBeLowered(nn.Module):
    def __init__(self, bad):
        super().__init__()
        self.l,self.bad = nn.Linear(4, 4),bad
    def forward(self, x):
        h = self.l(x)
        return h + h[:0].cumprod(0).sum() if self.bad else h

def test_a_fit_after_an_error_of_torch_xla():
    "Every later fit in the process ended with `Check failed: tensor_data`, as long as the error was kept"
    x = torch.randn(32, 4)
    def fit(bad):
        dls = DataLoaders.from_dsets(*[torch.utils.data.TensorDataset(x, x)]*2, bs=8, num_workers=0)
        learn = Learner(dls, CannotBeLowered(bad), loss_func=nn.MSELoss()).to_xla()
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2)
    with pytest.raises(RuntimeError, match='lowering') as kept: fit(True)
    with pytest.warns(UserWarning, match='has left .* tensors without a value, 2 of them parameters'): fit(False)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*without a value')
        fit(False)
    assert kept

def mask_learner(codes, n_out=4, tfms=None, loss_func=None, model=noop, **kwargs):
    "Masks of such codes"
    g = torch.Generator().manual_seed(0)
    x,y = torch.randn(24, 3, 8, 8, generator=g),torch.tensor(codes)[torch.randint(len(codes), (24, 8, 8), generator=g)]
    items = [(TensorImage(a), TensorMask(b)) for a,b in zip(x, y)]
    dls = DataLoaders.from_dsets(items, items, bs=8, num_workers=0, after_batch=tfms)
    return Learner(dls, model(nn.Conv2d(3, n_out, 1)), loss_func=loss_func or CrossEntropyLossFlat(axis=1), **kwargs)

class Own(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.m = m
    def forward(self, x): return self.m(x)
class MapsVoid(Callback):
    def before_batch(self): self.learn.yb = (torch.where(self.y == 255, 0, self.y),)
class Watches(Callback):
    def after_batch(self): self.seen = self.pred.shape
void = [0, 1, 2, 3, 255]

refused = dict(void=dict(codes=void), binary=dict(codes=[0, 255], n_out=2), negative=dict(codes=[-1, 0]),
    own_model=dict(codes=void, model=Own), own_callback=dict(codes=void, cbs=Watches),
    augmented=dict(codes=void, tfms=[*aug_transforms(), IntToFloatTensor()]),
    function=dict(codes=void, loss_func=partial(F.cross_entropy, ignore_index=3)))
@pytest.mark.parametrize('kwargs', [dict(), dict(replay=False), dict(steps_per_execution=2)], ids=['replayed', 'retraced', 'several'])
@pytest.mark.parametrize('learner', refused.values(), ids=refused)
def test_targets_out_of_range(learner, kwargs):
    "What raises on the CPU does so here, at the end of the first batch"
    learn = mask_learner(**learner)
    with learn.no_bar(), learn.no_logging():
        with pytest.raises(IndexError, match='Target .* is out of bounds') as cpu: learn.fit(1)
        with pytest.raises(IndexError, match=re.escape(str(cpu.value).split('\n')[-1])) as xla: learn.to_xla(**kwargs).fit(1)
    assert (learn.epoch, learn.iter) == (0, 0) and all(o in str(xla.value) for o in ('compiled program', 'ignore_index=', 'n_out'))

def test_targets_out_of_range_in_validation():
    learn = mask_learner([0, 1, 2, 3])
    learn.dls.loaders[1] = mask_learner(void).dls.valid
    learn.to_xla()
    with learn.no_bar(), learn.no_logging(), pytest.raises(IndexError, match='Target 255 is out of bounds'): learn.fit(1)
    assert not learn.training and learn.recorder.losses

@pytest.mark.parametrize('kwargs', [dict(), dict(replay=False), dict(steps_per_execution=2)], ids=['replayed', 'retraced', 'several'])
def test_one_target_out_of_range_in_a_later_batch(kwargs):
    "As a class of which a split has one item"
    y = torch.randint(0, 3, (48,))
    y[33] = 3
    dls = DataLoaders.from_dsets(list(zip(torch.randn(48, 4), y)), bs=8, shuffle=False, num_workers=0, device='cpu')
    learn = Learner(dls, nn.Linear(4, 3), loss_func=CrossEntropyLossFlat())
    with learn.no_bar(), learn.no_logging():
        with pytest.raises(IndexError, match='Target 3 is out of bounds'): learn.fit(1)
        assert learn.iter == 4
        with pytest.raises(IndexError, match='Target 3 is out of bounds'): learn.to_xla(**kwargs).fit(1)
    assert learn.iter == 4

accepted = dict(ignored=dict(codes=void, loss_func=CrossEntropyLossFlat(axis=1, ignore_index=255)),
    own_callback=dict(codes=void, cbs=MapsVoid), divided=dict(codes=[0, 255], n_out=2, tfms=IntToFloatTensor(div_mask=255)),
    by_default=dict(codes=[-100, 0, 3]),
    own_transform=dict(codes=void, tfms=Transform(lambda x: x.clamp(max=3) if isinstance(x, TensorMask) else x)),
    dice=dict(codes=void, loss_func=DiceLoss()))
@pytest.mark.parametrize('learner', accepted.values(), ids=accepted)
def test_targets_that_only_look_out_of_range(learner):
    "Where the CPU trains, so does XLA"
    learn = mask_learner(**learner)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        learn.to_xla().fit(1)

@pytest.mark.parametrize('kwargs', [dict(), dict(replay=False), dict(steps_per_execution=2)], ids=['replayed', 'retraced', 'several'])
@pytest.mark.parametrize('codes', [void, [0, 1, 2, 3]], ids=['void', 'fine'])
def test_targets_that_nobody_sees_on_the_host(codes, kwargs):
    "Behind a transform of the user's: the loss is NaN, where it left them out and looked like any other"
    own = Transform(lambda x: x+0 if isinstance(x, TensorMask) else x)
    learn = mask_learner(codes, tfms=own, cbs=TerminateOnNaNCallback()).to_xla(**kwargs)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert all(o.isnan() for o in learn.recorder.losses) == (255 in codes)

def test_a_look_at_targets_costs_the_device_nothing(monkeypatch):
    def counts():
        learn = mask_learner([0, 1, 2, 3]).to_xla()
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
            with count_xla() as c: learn.fit(1)
        return c.compiles,c.executions,c.to_host,c.to_device
    counts()   # numbers that the process sends once
    looked = counts()
    monkeypatch.setattr('fastai_xla.opt_callback.watch_targets', lambda learn: None)
    assert looked == counts() and looked[:2] == (0, 6)

class OwnCovariance(nn.Module):
    def __init__(self):
        super().__init__()
        self.l,self.var = nn.Linear(4, 2),torch.full((2,), .4)
    def forward(self, x):
        mean = self.l(x)
        return torch.distributions.MultivariateNormal(mean, torch.diag_embed(self.var.expand_as(mean))).log_prob(x[:,:2])   # the line

@pytest.mark.parametrize('replay', ['auto', False])
def test_a_tensor_on_the_cpu_in_an_operator_that_falls_back(replay):
    "A triangular solve took it, and the backward pass ended with `invalid gradient`, which named no line"
    x = torch.randn(16, 4)
    dls = DataLoaders.from_dsets(*[torch.utils.data.TensorDataset(x, x)]*2, bs=8, num_workers=0)
    learn = Learner(dls, OwnCovariance(), loss_func=lambda p, y: -p.mean()).to_xla(replay=replay)
    line = next(i for i,o in enumerate(Path(__file__).read_text().splitlines(), 1) if o.endswith('   # the line'))
    told = f'test_errors.py, line {line}.*register_buffer'
    with learn.no_bar(), learn.no_logging(), pytest.raises(RuntimeError, match=told): learn.fit(1)
    learn.model.register_buffer('var', learn.model.__dict__.pop('var'))
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert torch.stack(learn.recorder.losses).isfinite().all()

class Graph(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        eye = torch.eye(4).to_sparse()
        if buffer: self.register_buffer('adj', eye)
        else: self.adj = eye
        self.l = nn.Linear(4, 1)
    def forward(self, x): return self.l(torch.sparse.mm(self.adj, x.T).T)

def graph_learner(model):
    xs = torch.randn(32, 4)
    dsets = L(zip(xs, xs.sum(1, keepdim=True))),L(zip(xs, xs[:,:1]))
    return Learner(DataLoaders.from_dsets(*dsets, bs=8, shuffle=False, device='cpu'), model,
                   loss_func=nn.MSELoss(), opt_func=SGD)

def test_sparse_tensors_are_told_of_and_the_learner_stays():
    learn = graph_learner(Graph(True))
    with pytest.raises(ValueError, match='`adj` of the model is a sparse tensor'): learn.to_xla()
    assert not hasattr(learn, 'xla_opt') and str(learn.dls.device) == 'cpu'
    with learn.no_logging(), learn.no_bar(): learn.fit(1)
    learn = graph_learner(Graph(False)).to_xla()
    with learn.no_logging(), learn.no_bar(), pytest.raises(RuntimeError, match='The step computes with a sparse tensor'): learn.fit(1)

def test_a_learner_that_cannot_move_is_where_it_was(monkeypatch):
    learn = graph_learner(nn.Linear(4, 1))
    def fails(*args): raise RuntimeError('no room')
    with monkeypatch.context() as m:
        m.setattr('fastai_xla.opt_callback.explain_mixed', fails)
        with pytest.raises(RuntimeError, match='no room'): learn.to_xla()
    assert not hasattr(learn, 'xla_opt') and str(learn.dls.device) == 'cpu' and next(learn.model.parameters()).device.type == 'cpu'
    with learn.no_logging(), learn.no_bar(): learn.fit(1)

def test_an_embedding_with_sparse_gradients():
    losses = []
    for on_xla in (False, True):
        torch.manual_seed(0)
        learn = graph_learner(nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Flatten(), nn.Linear(16, 1)))
        for dl in learn.dls.loaders: dl.dataset = [(x.long().clamp(0, 2), y) for x,y in dl.dataset]
        if on_xla: learn.to_xla()
        with learn.no_logging(), learn.no_bar(): learn.fit(2, 1e-2)
        losses.append([float(o) for o in learn.recorder.losses])
    test_close(*losses, eps=1e-5)
