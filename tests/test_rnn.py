"Recurrent layers as loops on the device against PyTorch on the CPU in float64: outputs, last states and all gradients"
import os, re
from copy import deepcopy
import own_process, pytest, torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from fastai_xla.runtime import *
from fastai_xla.runtime import torch_xla
from fastai_xla.transfer import *
from fastai_xla.lowerings.core import register_lowerings, without_lowerings
from fastai_xla.lowerings.loop import *
import fastai_xla.lowerings.rnn

kinds = dict(lstm=nn.LSTM, gru=nn.GRU, tanh=nn.RNN, relu=lambda *args, **kwargs: nn.RNN(*args, nonlinearity='relu', **kwargs),
             proj=lambda *args, **kwargs: nn.LSTM(*args, proj_size=3, **kwargs))
steps,bs,n_in,n_hid = 7,4,5,6

device()
register_lowerings()

def flat(o):
    if isinstance(o, PackedSequence): return [o.data]
    return [o] if isinstance(o, torch.Tensor) else [t for p in o for t in flat(p)]

def state(m, bs, g):
    n = m.num_layers*(2 if m.bidirectional else 1)
    h = torch.randn(n, bs, m.proj_size or m.hidden_size, generator=g)
    return (h, torch.randn(n, bs, m.hidden_size, generator=g)) if isinstance(m, nn.LSTM) else h

def results(m, x, hx, lens=None):
    "Outputs, last states and gradients of `m`"
    leaves = [t.detach().clone().requires_grad_() for t in (x, *flat(hx))]
    x,*hs = leaves
    if lens is not None: x = pack_padded_sequence(x, lens, batch_first=m.batch_first, enforce_sorted=False)
    outs = flat(m(x, tuple(hs) if len(hs) > 1 else hs[0]))
    loss = sum((o*torch.linspace(-1, 1, o.numel(), device=o.device, dtype=o.dtype).view(o.shape)).sum() + o.pow(2).sum() for o in outs)
    return outs + list(torch.autograd.grad(loss, [*leaves, *m.parameters()]))

def check(m, x, lens=None, tol=1e-5, g=None):
    hx = state(m, x.shape[0 if m.batch_first else 1] if x.dim() == 3 else 1, torch.Generator().manual_seed(1))
    if x.dim() == 2: hx = tuple(h[:,0] for h in hx) if isinstance(hx, tuple) else hx[:,0]
    to = lambda o, *args: tuple(t.to(*args) for t in o) if isinstance(o, tuple) else o.to(*args)
    want = results(deepcopy(m).double(), x.double(), to(hx, torch.float64), lens)
    with count_xla() as n: got = fetch(results(deepcopy(m).to(device()), x.to(device()), to(hx, device()), lens))
    assert not n.fallbacks, n
    for a,b in zip(got, want, strict=True): assert (a-b).abs().max() <= tol*b.abs().max().clamp(min=1e-3), (a-b).abs().max()

def data(*sz): return torch.randn(*sz, generator=torch.Generator().manual_seed(0))

@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('kwargs', [dict(), dict(num_layers=2), dict(bidirectional=True, num_layers=2), dict(bias=False),
                                    dict(batch_first=True), dict(batch_first=True, bias=False, bidirectional=True, num_layers=2)],
                         ids=lambda k: '-'.join(k) or 'plain')
def test_layer(kind, kwargs):
    torch.manual_seed(0)
    check(kinds[kind](n_in, n_hid, **kwargs), data(steps, bs, n_in))

@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('kwargs', [dict(), dict(bidirectional=True, num_layers=2), dict(batch_first=True, bias=False)],
                         ids=lambda k: '-'.join(k) or 'plain')
def test_packed(kind, kwargs):
    torch.manual_seed(0)
    check(kinds[kind](n_in, n_hid, **kwargs),
          data(*((bs, steps) if 'batch_first' in kwargs else (steps, bs)), n_in), torch.tensor([3,7,1,5]))

@pytest.mark.parametrize('kind', kinds)
def test_packed_even(kind): check(kinds[kind](n_in, n_hid), data(steps, bs, n_in), torch.full((bs,), steps))

@pytest.mark.parametrize('kind', kinds)
def test_one_step(kind): check(kinds[kind](n_in, n_hid, bidirectional=True), data(1, 1, n_in))

@pytest.mark.parametrize('kind', kinds)
def test_unbatched(kind): check(kinds[kind](n_in, n_hid), data(steps, n_in))

@pytest.mark.parametrize('kind', kinds)
def test_without_grad(kind):
    m,x = kinds[kind](n_in, n_hid, num_layers=2),data(steps, bs, n_in)
    with torch.no_grad():
        want = flat(deepcopy(m).double()(x.double()))
        for a,b in zip(fetch(flat(m.to(device())(x.to(device())))), want, strict=True): assert (a-b).abs().max() < 1e-5

@pytest.mark.parametrize('batch_first', [True, False])
@pytest.mark.parametrize('total', [None, steps+2])
def test_pack_and_pad(batch_first, total):
    x,lens = data(*((bs, steps) if batch_first else (steps, bs)), n_in),torch.tensor([7,5,3,1])
    def run(x):
        x.requires_grad_()
        p = pack_padded_sequence(x, lens, batch_first)
        y,n = pad_packed_sequence(p, batch_first, padding_value=-2., total_length=total)
        y.pow(3).sum().backward()
        return [p.data, p.batch_sizes, y, n, x.grad]
    with count_xla() as n: got = fetch(run(x.to(device())))
    assert not n.fallbacks and n.to_host == 1
    for a,b in zip(got, run(x), strict=True): assert torch.allclose(a, b)

def graph(ts):
    from torch_xla import _XLAC
    return _XLAC._get_xla_tensors_text(ts)

def n_ops(steps): return len(graph(flat(nn.LSTM(n_in, n_hid).to(device())(data(steps, bs, n_in).to(device())))).splitlines())

def test_size():
    "The graph does not grow with the sequence; without the lowering it does"
    assert n_ops(4) == n_ops(40)
    with without_lowerings('rnn'): assert n_ops(40) > 5*n_ops(4)

def test_dropout():
    "Between layers only, in training only, and scaled"
    m = nn.LSTM(n_in, 64, num_layers=2, dropout=.5).to(device())
    x,e = data(steps, 64, n_in).to(device()),m.state_dict()
    first = nn.LSTM(n_in, 64).to(device())
    first.load_state_dict({k: v for k,v in e.items() if k.endswith('l0')})
    with torch.no_grad():
        for k,v in e.items():
            if k.endswith('l1'): v.zero_()
        m.weight_ih_l1[128:192] = torch.eye(64, device=device())*.01   # the second layer's `g` sees one unit of the first each
        seen = m(x)[0][0]*4/.01    # step 0: h = .5*tanh(.5*g), g = tanh(.01*y), so nearly y*.01/4
        y = first(x)[0][0]
        seen,plain,y = fetch([seen, m.eval()(x)[0][0]*4/.01, y])
    assert (plain-y).abs().max() < 1e-2
    kept = seen != 0
    assert .45 < kept.float().mean() < .55
    assert ((seen-2*y)[kept]).abs().max() < 1e-2

def test_same_graph():
    "Step after step is one graph, and packed sequences of one total share one"
    m = nn.LSTM(n_in, n_hid, num_layers=2).to(device())
    opt = torch.optim.SGD(m.parameters(), .1)
    def step(lens=None):
        x = data(steps, bs, n_in).to(device())
        if lens: x = pack_padded_sequence(x, torch.tensor(lens))
        flat(m(x))[0].pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
        sync()
    for _ in range(2): step()
    with count_xla() as n: [step() for _ in range(3)]
    assert (n.compiles, n.executions, n.to_host, n.n_fallbacks) == (0, 3, 0, 0)

def test_autocast():
    m,x = nn.LSTM(n_in, n_hid),data(steps, bs, n_in)
    want = m(x)[0]
    m.to(device())
    with torch.autocast('xla', torch.bfloat16): got = m(x.to(device()))[0]
    assert got.dtype == torch.bfloat16
    assert (fetch(got).float()-want).abs().max() < 2e-2
    got.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and fetch(p.grad).isfinite().all() for p in m.parameters())

@pytest.mark.parametrize('dtype,tol', [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
def test_dtype(dtype, tol):
    m,x = nn.LSTM(n_in, n_hid),data(steps, bs, n_in)
    want = deepcopy(m).double()(x.double())[0]
    got = fetch(m.to(device(), dtype)(x.to(device(), dtype))[0])
    assert got.dtype == dtype and (got-want).abs().max() < tol

def test_other_devices():
    "The CPU has its own kernels, bit for bit"
    m,x = nn.LSTM(n_in, n_hid, num_layers=2, bidirectional=True),data(steps, bs, n_in)
    got = results(m, x, state(m, bs, torch.Generator().manual_seed(1)))
    with without_lowerings(): want = results(m, x, state(m, bs, torch.Generator().manual_seed(1)))
    assert all(torch.equal(a, b) for a,b in zip(got, want))

def test_empty():
    with pytest.raises(RuntimeError, match='larger than 0'): nn.LSTM(n_in, n_hid).to(device())(torch.zeros(0, bs, n_in, device=device()))

_split = """
import numpy as np, torch
from torch import nn
import torch_xla.runtime as xr, torch_xla.distributed.spmd as xs
xr.use_spmd()
from fastai_xla.runtime import *
from fastai_xla.runtime import torch_xla
from fastai_xla.lowerings.core import register_lowerings
import fastai_xla.lowerings.rnn
device()
register_lowerings()
torch.manual_seed(0)
m,x = nn.LSTM(5, 6, 2, bidirectional=True),torch.randn(7, 8, 5)
def run(m, x):
    y = m(x)[0]
    return [y.detach(), *torch.autograd.grad(y.pow(2).sum(), list(m.parameters()))]
want = run(m, x)
m,x = m.to(device()),x.to(device())
xs.mark_sharding(x, xs.Mesh(np.arange(4), (4,), ('data',)), (None,'data',None))
got = run(m, x)
sync()
import torch_xla
assert torch_xla._XLAC._get_xla_sharding_spec(got[0]) == '{devices=[1,4,1]0,1,2,3}', torch_xla._XLAC._get_xla_sharding_spec(got[0])
for a,b in zip(got, want): assert (a.cpu()-b).abs().max() < 1e-5*b.abs().max()
"""

def test_split_batch(tmp_path):
    "A batch that is split over four devices stays split through all layers and directions"
    res = own_process.run(['-c', _split], tmp_path, env=os.environ | dict(CPU_NUM_DEVICES='4', PJRT_DEVICE='CPU'))
    assert not res.returncode, res.stderr[-2000:]

@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('rows', [16, 5])
def test_as_a_tpu_runs_it(kind, rows):
    "Steps first, and rows one after the other where they fill tiles: the same numbers"
    with for_tpu():
        for kwargs in (dict(), dict(bidirectional=True, num_layers=2), dict(batch_first=True, bias=False)):
            m = kinds[kind](n_in, n_hid, **kwargs)
            check(m, data(*((rows, steps, n_in) if m.batch_first else (steps, rows, n_in))))
        check(kinds[kind](n_in, n_hid, bidirectional=True), data(steps, rows, n_in), torch.arange(rows)%steps + 1)

def loop_text(rows=8):
    from fastai_xla.graphs import hlo_text
    return hlo_text(flat(nn.LSTM(n_in, n_hid).to(device())(data(steps, rows, n_in).to(device()))))

def test_who_has_steps_first(monkeypatch):
    "One TPU; not a CPU, not a batch that is split over devices"
    def is_flat(*args): return bool(re.search(rf'while\.?\d* = .*f32\[{steps*8},{n_hid}\]', loop_text(*args)))
    assert not is_flat() and not steps_first()
    with for_tpu(): assert is_flat() and not is_flat(5)
    with for_tpu(8): assert not is_flat()
    monkeypatch.setattr(torch_xla.runtime, 'device_type', lambda: 'TPU')
    assert steps_first() and is_flat()
    monkeypatch.setattr(torch_xla.runtime, 'is_spmd', lambda: True)
    assert not steps_first() and not is_flat()

def test_an_output_gate_that_is_nearly_shut_keeps_its_digits():
    torch.manual_seed(0)
    m,x,zeros = nn.LSTM(n_in, n_hid),data(steps, bs, n_in),torch.zeros(1, bs, n_hid)
    with torch.no_grad(): m.bias_hh_l0[3*n_hid:] = -15.
    got = fetch(deepcopy(m).to(device())(x.to(device()), (zeros.to(device()), zeros.to(device())))[0])
    want = m.double()(x.double(), (zeros.double(), zeros.double()))[0]
    assert ((got-want).abs() <= 1e-5*want.abs()).all()
