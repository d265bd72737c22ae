"""What products of float32 keep on a TPU: chosen by `to_xla`, imitated by `tpu_numerics`, and known to the parity tools

    make test ARGS='tests/test_precision.py'"""
from contextlib import ExitStack, nullcontext
from copy import deepcopy
import pytest, torch
from fastai.vision.all import *
from fastai.text.all import AWD_LSTM, LMLearner, get_language_model
import own_process
from common import *
from fastai_xla.all import *
from fastai_xla.graphs import hlo_text
from fastai_xla.precision import *
from fastai_xla.runtime import _XLAC
from fastai_xla.parity import backends, calls

@pytest.fixture
def setting():
    was = _XLAC._xla_get_mat_mul_precision()
    yield
    _XLAC._xla_set_mat_mul_precision(was)

def lin_learner(**kwargs):
    torch.manual_seed(0)
    x = torch.randn(64, 12)
    dl = DataLoader(list(zip(x, x[:,:2].sum(1, keepdim=True).sin())), bs=16, num_workers=0)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
    return Learner(DataLoaders(dl, dl), model, loss_func=MSELossFlat(), opt_func=partial(SGD, mom=.9), **kwargs).remove_cb(ProgressCallback)

def test_setting_reaches_the_program_and_the_report(setting):
    learn,x = lin_learner(),torch.randn(3, 12, device=device())
    (x@x.T).cpu()
    with pytest.warns(UserWarning, match="has been 'default'.*those of [0-9]+ programs"): learn.to_xla(matmul_precision='high')
    assert 'operand_precision={high,high}' in hlo_text([x@x.T])
    with learn.no_logging(): learn.fit(1)
    assert "Matrix precision 'high': on a TPU, products of float32 take 3 passes of bfloat16" in repr(learn.xla_report())
    _XLAC._xla_set_mat_mul_precision('default')
    assert 'Matrix precision' not in repr(learn.xla_report())

def test_first_call_of_a_process_does_not_warn(tmp_path):
    code = """import warnings
from fastai.basics import *
from fastai_xla.all import *
from fastai_xla.runtime import _XLAC
warnings.simplefilter('error', UserWarning)
x = torch.randn(8, 3)
dl = DataLoader(list(zip(x, x)), bs=4, num_workers=0)
learn = Learner(DataLoaders(dl, dl), nn.Linear(3, 3), loss_func=MSELossFlat())
learn.to_xla(matmul_precision='highest')
print(_XLAC._xla_get_mat_mul_precision())"""
    res = own_process.run(['-c', code], tmp_path)
    assert res.stdout.strip() == 'highest', res.stderr

@pytest.mark.parametrize('on', ['cpu', 'xla'])
def test_innermost_block_holds(on):
    torch.manual_seed(0)
    a,b = (torch.randn(64, 64).to(device() if on == 'xla' else on) for _ in range(2))
    exact = a.cpu().double()@b.cpu().double()
    def error(*precisions):
        with ExitStack() as stack:
            for p in precisions: stack.enter_context(tpu_numerics(p))
            return float(((a@b).cpu()-exact).abs().max())
    kinds = dict(default=error('default'), high=error('high'), highest=error('highest'))
    assert kinds['default'] > 50*kinds['high'] > 100*kinds['highest']
    for outer in kinds:
        for inner,alone in kinds.items(): assert error(outer, inner) == alone

def test_unknown_precision():
    learn = lin_learner()
    with pytest.raises(ValueError, match="no matmul precision 'bf16'.*'default'.*'high'.*'highest'"): learn.to_xla(matmul_precision='bf16')
    assert not hasattr(learn, 'xla_opt')
    with pytest.raises(ValueError, match='no matmul precision'), tpu_numerics('float32'): pass

def losses_of(learn, *contexts):
    with ExitStack() as stack:
        for c in (learn.no_logging(), *contexts): stack.enter_context(c)
        learn.fit(3, .05)
    return torch.stack([torch.as_tensor(l) for l in learn.recorder.losses])

def test_recordings_of_another_precision_are_not_used():
    plain = losses_of(lin_learner().to_xla())
    traced = losses_of(lin_learner().to_xla(replay=False), tpu_numerics())
    assert largest(traced, plain) > 1e-5
    learn = lin_learner().to_xla()
    weights = deepcopy(learn.model.state_dict())
    for context,truth in ((nullcontext(), plain), (tpu_numerics(), traced), (nullcontext(), plain)):
        learn.model.load_state_dict(weights)
        learn.create_opt()
        assert largest(losses_of(learn, context), truth) < 1e-7
        assert not learn.xla_report().plain

@torch.no_grad()
def largest(a, b): return float((a-b).abs().max()/b.abs().max())

class Mask(Module):
    "Writes into views of tensors that it makes on the device"
    def __init__(self): self.lin = nn.Linear(6, 6)
    def forward(self, x):
        m = torch.zeros(6, device=x.device, dtype=x.dtype)
        m[1:4] += 1.
        m[2] = 3.
        return self.lin(x)*m

def test_writes_to_views_of_new_tensors():
    "In a dispatch mode torch_xla's factories leave out the wrapper that these need"
    torch.manual_seed(0)
    model,x = Mask(),torch.randn(4, 6)
    with tpu_numerics(): want,got = model(x),model.to(device())(x.to(device()))
    assert largest(got.cpu(), want) < 1e-6 and want[:,2].abs().max() > 0
    assert not locate_fault(nn.Sequential(Mask(), nn.Linear(6, 2)), x)

def awd_lstm():
    config = dict(emb_sz=24, n_hid=32, n_layers=2, pad_token=1, bidir=False, output_p=.1, hidden_p=.1,
                  input_p=.1, embed_p=.1, weight_p=.1, tie_weights=True, out_bias=True)
    return get_language_model(AWD_LSTM, 100, config=config),torch.randint(100, (4, 10))

def attention(): return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),torch.randn(4, 12, 32)
def convnet():
    head = nn.AdaptiveAvgPool2d(1),Flatten(),nn.Linear(16, 3)
    return nn.Sequential(ConvLayer(1, 8), ConvLayer(8, 16, stride=2), *head),torch.randn(4, 1, 8, 8)

@pytest.mark.parametrize('make', [awd_lstm, attention, convnet])
def test_no_alarm_where_products_are_rounded(make):
    torch.manual_seed(0)
    model,x = make()
    model = nn.Sequential(model, *([Lambda(lambda o: o[0])] if make is awd_lstm else []))
    f = locate_fault(model, x, backends=('cpu', 'cpu/default', 'xla/default', 'xla'))
    assert not f, f
    with tpu_numerics(): assert not locate_fault(model, x)

def rounds_unseen(monkeypatch):
    "A device that rounds, to tools that do not know it"
    ran = calls._ran
    def _ran(call, backend, rounded):
        with monkeypatch.context() as m:
            m.setattr(backend, 'numerics', tpu_numerics)
            return ran(call, backend, rounded)
    monkeypatch.setattr('fastai_xla.parity.locate._ran', _ran)

def test_alarm_where_rounding_is_not_known(monkeypatch):
    torch.manual_seed(0)
    model,x = convnet()
    rounds_unseen(monkeypatch)
    assert locate_fault(model, x, backends=('cpu',))

class Off(nn.Linear):
    "A layer that is off by 5% on XLA"
    def forward(self, x): return super().forward(x)*(1.05 if is_xla(x) else 1.)

def test_fault_where_products_are_rounded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), Off(32, 32), nn.ReLU(), nn.Linear(32, 3))
    f = locate_fault(model, (torch.randn(8, 12), torch.randint(3, (8,))), F.cross_entropy, backends=('cpu/default', 'xla/default'))
    assert (f.path, f.phase, f.backend) == ('2', 'forward', 'xla/default'), f

def compared(): return compare_backends(lin_learner, ('cpu', 'cpu/default', 'xla/default'), n_epoch=3, lr=.05, roundings=2)

def test_backends_of_several_precisions():
    r = compared()
    assert r.verdicts == {'cpu': 'rounding', 'cpu/default': 'rounding', 'xla/default': 'rounding'} and not r.left_out, r
    assert set(r.losses) == {'float64', 'float64/default', *r.verdicts}
    assert largest(torch.tensor(r.losses['cpu/default']), torch.tensor(r.losses['float64'])) > 1e-5
    r.plot()

def test_fault_beside_rounded_products():
    with swap_op('aten.tanh_backward', 'xla', lambda g, y: g*(1-y*y)*1.05): r = compared()
    assert r.verdicts == {'cpu': 'rounding', 'cpu/default': 'rounding', 'xla/default': 'fault'}, r

def test_rounded_products_against_the_wrong_truth(monkeypatch):
    monkeypatch.setattr(backends, '_truth_name', lambda products: 'float64')
    r = compared()
    assert r.verdicts == {'cpu': 'rounding', 'cpu/default': 'fault', 'xla/default': 'fault'}, r

def test_programs_of_inductor_are_left_out():
    r = compare_backends(lin_learner, ('inductor/default', 'cpu/default'), roundings=1)
    assert 'tpu_numerics' in r.left_out['inductor/default'] and r.verdicts == {'cpu/default': 'rounding'}
