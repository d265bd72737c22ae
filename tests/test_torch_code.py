"Plain torch code on the XLA device, beside a learner or without one"
import tempfile
from pathlib import Path

import own_process, pytest, torch
import torch.nn.functional as F

from fastai_xla.all import *
from fastai_xla.runtime import *
from fastai_xla.graphs import *
from fastai_xla.transfer import *

dev = device()

def run(code):
    "`code` in a process of its own"
    with tempfile.TemporaryDirectory() as d: res = own_process.run(['-c', code], Path(d), Path(__file__).parent)
    assert res.returncode == 0, res.stdout+res.stderr
    return res.stdout

# From the import on

imported = '''
import fastai_xla.all
from fastai_xla.runtime import xla_counts, XLACounts, count_xla
assert xla_counts() == XLACounts(), xla_counts()
import torch, torch_xla, torch.nn.functional as F
from torch import nn
from torch_xla.debug import metrics
assert not metrics.counter_value('CreateXlaTensor')
dev = torch_xla.device()
'''

def test_lowerings_hold_from_the_import_on():
    "torch_xla's own kernel crashes in the first and falls back to the CPU in the second; nobody has called to_xla"
    run(imported + '''
x,grid = torch.randn(4, 3, 5, 5),torch.rand(4, 6, 6, 2)*2-1
def grads(dev):
    m,a,g = nn.BatchNorm2d(3).eval().to(dev),x.detach().to(dev).requires_grad_(),grid.detach().to(dev).requires_grad_()
    F.grid_sample(m(a), g, align_corners=False).square().sum().backward()
    return [t.cpu() for t in (a.grad, g.grad, m.weight.grad, m.bias.grad)]
expected = grads('cpu')
with count_xla() as c: actual = grads(dev)
assert not c.fallbacks, c
for a,e in zip(actual, expected): torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
''')

# The same numbers, types and gradients as on the CPU

gen = torch.Generator().manual_seed(0)
def rand(*size): return torch.randn(*size, generator=gen)

x34,x45,x233 = rand(3, 4),rand(4, 5),rand(2, 3, 3)
mask = x34 > 0

calls = dict(
    elu=lambda x: F.elu(x, 1.3), celu=lambda x: F.celu(x, .7), selu=F.selu,
    selu_inplace=lambda x: F.selu(x*1, inplace=True), elu_twice=lambda x: F.elu(F.elu(x)).exp(),
    amax=lambda x: x.amax(), amin=lambda x: x.amin(keepdim=True), amax_dims=lambda x: x.amax((0,1)),
    norm_inf=lambda x: x.norm(p=float('inf')), norm_zero=lambda x: x.norm(p=0, dim=1),
    cumsum=lambda x: x.cumsum(1), cumsum_of_mask=lambda x: (x > 0).cumsum(1),
    cumsum_int=lambda x: (x.clamp(-3, 3)*40).to(torch.int8).cumsum(0), mask_or_flags=lambda x: mask.to(x.device) | (x*3).long(),
    one_sample=lambda x: F.cross_entropy(x[0], torch.tensor(2, device=x.device)),
    one_sample_none=lambda x: F.nll_loss(x[0], torch.tensor(1, device=x.device), reduction='none'),
    slice_before_first=lambda x: x[:,-7:].exp(), slice_to_before_first=lambda x: x[:,:-9],
    slice_with_step=lambda x: x[-99:99:2].exp()[...,-2:], slice_of_view=lambda x: x.t()[-9:,-1:].exp())

def results(f, dev):
    "Value of `f`, and its gradient where it has one"
    x = x34.detach().to(dev).requires_grad_()
    y = f(x)
    if not y.requires_grad: return [y]
    grad = torch.autograd.grad((y*torch.arange(1., 1+y.numel()).view(y.shape).to(dev)).sum(), x, allow_unused=True)[0]
    return [y.detach()] if grad is None else [y.detach(), grad]

def test_values_types_and_gradients_are_those_of_the_cpu():
    with count_xla() as c: actual = fetch({n: results(f, dev) for n,f in calls.items()})
    assert not c.fallbacks, c
    for n,f in calls.items():
        for a,e in zip(actual[n], results(f, 'cpu')):
            assert (n, a.dtype, a.shape) == (n, e.dtype, e.shape)
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6, msg=lambda m: f'{n}: {m}')

def test_slices_before_the_first_element_are_views():
    y,e = x34.to(dev),x34.clone()
    for t in (y, e): t[:,-7:2] = 1
    with torch.no_grad(): part = y[-9:]
    part.add_(1)
    assert part._base is not None
    torch.testing.assert_close(y.cpu(), e+1)

# Einsum

equations = {'ij,jk->ik': (x34, x45), 'ij,kj': (x34, rand(2, 4)), '...ij,...jk->...ik': (x233, rand(5, 1, 3, 4)),
    'ij,jk->ik size 1': (x34, rand(1, 5)), 'ij,ij->j': (rand(1, 4), x34), 'ii': (x233[0],), 'ii->i': (x233[0],), 'bii->bi': (x233,),
    'ij->': (x34,), 'i,j->ij': (x34[0], x34[1]), 'bij,bjk,bkl->bil': (x233, x233, x233), '...d,d->...': (x34, x34[0]),
    'ijk,jk->i': (x233, x233[0]), 'bhqd,bhkd->bhqk': (rand(2, 2, 3, 4), rand(2, 2, 5, 4))}
mismatched = {'ij,jk->ik': (x34, x34), 'bij,bjk->bik': (x233, rand(3, 3, 3)), 'i,i->': (x34[0], x45[0]),
              'ij,ij->ij': (x34, rand(3, 5)), 'ii->i': (x34,), 'ij,jk->iq': (x34, x45), 'ij,jk->': (x34,), 'ij->iij': (x34,)}

def einsum(eq, ts, dev, dtype):
    ts = [t.detach().to(dev, dtype).requires_grad_() for t in ts]
    y = torch.einsum(eq.split(' size')[0], *ts)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), ts)]

@pytest.mark.parametrize('dtype,limit', [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_einsum_gives_the_numbers_of_the_cpu(dtype, limit):
    with count_xla() as c: actual = fetch({eq: einsum(eq, ts, dev, dtype) for eq,ts in equations.items()})
    assert not c.fallbacks, c
    for eq,ts in equations.items():
        for a,e in zip(actual[eq], einsum(eq, [t.to(dtype) for t in ts], 'cpu', torch.float64)):
            assert a.shape == e.shape and a.dtype == dtype
            assert (a.double()-e).abs().max() < limit*e.abs().max().clamp(min=1), eq

@pytest.mark.parametrize('grad', (False, True))
@pytest.mark.parametrize('eq', mismatched)
def test_einsum_of_sizes_that_do_not_match_is_an_error(eq, grad):
    for d in ('cpu', dev):
        with pytest.raises(RuntimeError, match='einsum'): torch.einsum(eq, *[t.detach().to(d).requires_grad_(grad) for t in mismatched[eq]])

# Permutations

def draw(n, **kwargs):
    sync()
    return torch.randperm(n, device=dev, **kwargs)

def test_permutation_is_drawn_once_and_repeats_from_a_seed():
    manual_seed(7)
    with count_xla() as c: p = draw(64)
    halves = [p[:32].cpu(), p[32:].cpu()]
    assert torch.equal(torch.cat(halves), p.cpu()) and torch.equal(p.sort()[0].cpu(), torch.arange(64)) and not c.fallbacks
    again = draw(64).cpu()
    assert not torch.equal(again, p.cpu())
    manual_seed(7)
    assert torch.equal(draw(64).cpu(), p.cpu())

def test_permutations_are_uniform():
    manual_seed(3)
    draws = [tuple(p) for _ in range(20) for p in torch.stack([draw(3) for _ in range(15)]).tolist()]
    assert len(set(draws)) == 6 and sum((draws.count(p)-50)**2/50 for p in set(draws)) < 25.7   # chi-square, 99.99%

def test_arguments_of_randperm():
    assert [draw(n).tolist() for n in (0, 1)] == [[], [0]]
    assert [draw(5, dtype=t).dtype for t in (torch.int32, torch.float32)] == [torch.int32, torch.float32]
    out = torch.empty(5, dtype=torch.int64, device=dev)
    assert torch.randperm(5, out=out) is out and sorted(out.tolist()) == list(range(5))
    on_host = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(9, generator=torch.Generator().manual_seed(1)).cpu(), on_host)
    with pytest.raises(RuntimeError, match='non-negative'): draw(-1)
    with pytest.raises(RuntimeError, match='too large'): draw(300, dtype=torch.uint8)

# Graphs with one hash

def product(m, n, last): return m @ n @ (m if last == 'm' else n)

def test_graphs_that_differ_in_their_operands_have_their_own_values():
    m,n = rand(3, 3),rand(3, 3)
    on_xla = send([m, n], dev)
    sync()
    reads = dict(cpu=lambda t: t.cpu(), tolist=lambda t: torch.tensor(t.tolist()), copy=lambda t: t.to('cpu', torch.float64).float(),
                 fetch=fetch, each=lambda t: torch.tensor([o.item() for o in t.flatten()]).view(3, 3))
    for read in reads.values():
        for last in 'mn': torch.testing.assert_close(read(product(*on_xla, last)), product(m, n, last), rtol=1e-4, atol=1e-5)

def test_programs_of_such_graphs_are_two():
    ts = send([rand(3, 3), rand(3, 3)], dev)
    sync()
    expected = [product(*fetch(ts), last) for last in 'mn']
    for last,e in zip('mn', expected):
        root = [product(*ts, last)]
        inputs = graph_inputs(root)[1]
        res = run_graph(compile_graph(root), inputs)
        drop_pending()
        assert len(res) == 1
        torch.testing.assert_close(fetch(res[0]), e, rtol=1e-4, atol=1e-5)

# Bad arguments

bad = dict(mm=lambda x: x.mm(x), bmm=lambda x: x[None].bmm(x[None]), cat=lambda x: torch.cat([x, x[:, :2]]),
    index_shape=lambda x: x[(x > 0)[:2]], view=lambda x: x.view(5, 3), stack=lambda x: torch.stack([x, x[0]]), add=lambda x: x + x[0, :3],
    grid=lambda x: F.grid_sample(x[None,None], torch.zeros(2, 2, 2, 2, device=x.device), align_corners=False),
    gather=lambda x: x.gather(1, torch.zeros(4, 1, dtype=torch.int64, device=x.device)),
    topk=lambda x: x.topk(9), linear=lambda x: F.linear(x, x[:, :2]),
    cross_entropy=lambda x: F.cross_entropy(x, torch.zeros(2, dtype=torch.int64, device=x.device)), histc=lambda x: x.histc(0),
    layer_norm=lambda x: F.layer_norm(x, (3,)), conv=lambda x: F.conv1d(x[None], x[None, :2]), expand=lambda x: x.expand(2, 4))

@pytest.mark.parametrize('name', bad)
def test_wrong_sizes_are_an_error(name):
    for d in ('cpu', dev):
        with pytest.raises((RuntimeError, IndexError, ValueError)): bad[name](x34.to(d))
