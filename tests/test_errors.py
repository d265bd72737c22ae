"Bad input gets an error that says what happened, why on XLA, and what to type instead; and nothing is lost"
import warnings
import numpy as np, pytest, torch
from fastai.vision.all import *
from fastai_xla import runtime
from fastai_xla.all import *
from common import *

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

def test_a_batch_that_is_passed_over_is_no_end(recwarn):
    class Skips(Callback):
        def after_loss(self):
            if self.training and self.iter == 1: self.learn.loss = self.loss*float('nan')
            if torch.isnan(self.loss): raise CancelBatchException
    learn = quiet(cbs=Skips()).to_xla()
    learn.recorder.smooth_loss.beta = 0
    with learn.no_logging(): learn.fit(2)
    assert not all(map(math.isfinite, learn.recorder.losses)) and all(p.isfinite().all() for p in learn.model.parameters())
    assert not [w for w in recwarn if 'The loss is' in str(w.message)]

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
