"Large grids for the lowerings: every combination against the CPU in float64, and each fault shown with its lowering off"
import itertools
from contextlib import nullcontext
from copy import deepcopy

import pytest, torch
import torch.nn.functional as F
from torch import nn

from fastai_xla.runtime import *
from fastai_xla.transfer import *
from fastai_xla.lowerings.all import *

dev = device()
register_lowerings()

def error(a, e): return ((a.double()-e.double()).abs().max()/e.double().abs().max().clamp(min=1e-3)).item()

# Batch normalisation

shapes = {'1d': (nn.BatchNorm1d, (6,5)), '1d3': (nn.BatchNorm1d, (6,5,7)),
          '2d': (nn.BatchNorm2d, (4,5,3,3)), '3d': (nn.BatchNorm3d, (4,5,2,3,3))}
precisions = dict(fp32=(torch.float32, False), bf16=(torch.bfloat16, False), half=(torch.float16, False), autocast=(torch.float32, True))
bn_grid = list(itertools.product(shapes, (True, False),
                                 ('train', 'eval', 'frozen', 'untracked_train', 'untracked_eval', 'cumulative'), precisions))

def make_bn(dims, affine, mode):
    torch.manual_seed(0)
    m = shapes[dims][0](5, affine=affine, track_running_stats='untracked' not in mode)
    if affine: nn.init.normal_(m.weight), nn.init.normal_(m.bias)
    if m.running_mean is not None: m.running_mean.normal_(), m.running_var.uniform_(.5, 2)
    if mode == 'cumulative': m.momentum = None
    if mode == 'frozen': m.requires_grad_(False)
    return m.train(mode in ('train', 'untracked_train', 'cumulative'))

def bn_results(m, x, g, autocast=False):
    x = x.clone().requires_grad_()
    with torch.autocast('xla', torch.bfloat16) if autocast else nullcontext(): y = m(x)
    y.backward(g.to(y.dtype))
    grads = [x.grad] + [p.grad for p in m.parameters() if p.requires_grad]
    return [y.detach(), *grads, *([] if m.running_mean is None else [m.running_mean, m.running_var])]

def bn_case(dims, affine, mode, precision):
    dtype,autocast = precisions[precision]
    m,shape = make_bn(dims, affine, mode),shapes[dims][1]
    x,g = (torch.randn(shape)*2+1).to(dtype),torch.randn(shape).to(dtype)
    return bn_results(deepcopy(m).double(), x.double(), g.double()),bn_results(deepcopy(m).to(dev), x.to(dev), g.to(dev), autocast)

def bn_grid_errors(grid):
    cases,crashed = {},0
    for k in grid:
        try: cases[k] = bn_case(*k)
        except RuntimeError: crashed += 1
    actual = fetch({k: a for k,(_,a) in cases.items()})
    return {k: max(error(a, e) for a,e in zip(actual[k], es)) for k,(es,_) in cases.items()},crashed

def test_batch_norm_grid():
    errors,crashed = bn_grid_errors(bn_grid)
    assert len(errors) == len(bn_grid) == 192 and crashed == 0
    limit = dict(fp32=5e-6, autocast=5e-6, bf16=1e-2, half=2e-3)
    bad = {k: e for k,e in errors.items() if not e < limit[k[-1]]}
    assert not bad, bad

def test_batch_norm_grid_without():
    "In float32 only: mixed precisions do not even compile, and leave the process with a graph that never will"
    grid = [k for k in bn_grid if k[0] in ('1d', '2d') and k[-1] == 'fp32']
    with without_lowerings('batch_norm'): errors,crashed = bn_grid_errors(grid)
    assert crashed == 8 == 2*2*len(('eval', 'frozen'))
    assert {k[2] for k,e in errors.items() if e > 1e-3} == {'train', 'cumulative'}   # the biased running variance

def test_batch_norm_dtypes():
    m,x = nn.BatchNorm2d(5).to(dev),torch.randn(4, 5, 3, 3).to(dev)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        xd = x.to(dtype).requires_grad_()
        y = m(xd)
        y.sum().backward()
        assert y.dtype == xd.grad.dtype == dtype and m.weight.grad.dtype == m.running_var.dtype == torch.float32
        m.zero_grad()
    half = nn.BatchNorm2d(5).to(dev).bfloat16()
    half(x.bfloat16()).sum().backward()
    assert half.weight.grad.dtype == half.running_var.dtype == torch.bfloat16

@pytest.mark.parametrize('mom', [.1, .01, 1., 0.])
def test_batch_norm_running_50_steps(mom):
    torch.manual_seed(0)
    xs = torch.randn(50, 4, 5, 3, 3)*3+2
    m = nn.BatchNorm2d(5, momentum=mom)
    exact,ours = deepcopy(m).double(),deepcopy(m).to(dev)
    for x in xs:
        exact(x.double()), ours(x.to(dev))
        sync()
    assert max(error(a, e) for a,e in zip(fetch([ours.running_mean, ours.running_var]), (exact.running_mean, exact.running_var))) < 1e-6

@pytest.mark.parametrize('shape', [(4096,8), (16,8,8,8), (64,8,28,28)])
def test_batch_norm_large_mean(shape):
    torch.manual_seed(0)
    x = torch.randn(shape)+1000
    cls = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    diff = lambda: (fetch(cls(8).to(dev)(x.to(dev))) - cls(8).double()(x.double())).abs().max().item()
    assert diff() < 1e-4
    with without_lowerings('batch_norm'): assert not diff() < .05

def test_batch_norm_constant_channel():
    x = torch.full((8, 3, 4, 4), 7.3)
    assert torch.isfinite(fetch(nn.BatchNorm2d(3).to(dev)(x.to(dev)))).all()

@pytest.mark.parametrize('train', [True, False])
@pytest.mark.parametrize('dims,affine', [*((d, True) for d in shapes), ('2d', False)])
def test_batch_norm_second_derivatives(dims, affine, train):
    m = make_bn(dims, affine, 'train' if train else 'eval')
    x = torch.randn(shapes[dims][1])
    def second(m, x):
        x = x.clone().requires_grad_()
        ps = [x, *m.parameters()]
        first = torch.autograd.grad(m(x).sin().sum(), ps, create_graph=True)
        return torch.autograd.grad(sum(f.square().sum() for f in first), ps)
    expected,actual = second(deepcopy(m).double(), x.double()),fetch(second(deepcopy(m).to(dev), x.to(dev)))
    assert max(error(a, e) for a,e in zip(actual, expected)) < 2e-5

def test_batch_norm_legit():
    x,w = torch.randn(4, 5, 3, 3),torch.rand(5)
    op,none = torch.ops.aten._native_batch_norm_legit,torch.ops.aten._native_batch_norm_legit.no_stats
    for f in (lambda x, w: none(x, w, w, True, .1, 1e-5)[0], lambda x, w: op(x, w, w, w.clone(), w.clone(), True, .1, 1e-5)[0],
              lambda x, w: op(x, w, w, w.clone(), w.clone(), False, .1, 1e-5)[0]):
        assert error(f(x.to(dev), w.to(dev)).cpu(), f(x.double(), w.double())) < 1e-6

def test_batch_norm_one_graph():
    m,x = nn.BatchNorm2d(5).to(dev),torch.randn(4, 5, 3, 3).to(dev)
    def step():
        m(x).square().sum().backward()
        m.zero_grad()
        sync()
    step(), step()
    with count_xla() as c: [step() for _ in range(3)]
    assert (c.compiles,c.executions,c.to_host,c.n_fallbacks) == (0,3,0,0)

@pytest.mark.parametrize('ctx', [torch.inference_mode, torch.no_grad])
def test_without_gradients(ctx):
    """Parameters made outside of the mode, as in every validation

    In inference mode torch_xla cannot take a view of such a tensor: nothing here does"""
    torch.manual_seed(0)
    x = torch.randn(4, 5, 4, 4)
    fs = dict(bn_eval=make_bn('2d', True, 'eval'), bn_train=make_bn('2d', True, 'train'),
        grid=lambda x: F.grid_sample(x, F.affine_grid(torch.eye(2, 3).expand(4, 2, 3), (4,5,3,3), align_corners=False).to(x),
                                     align_corners=False),
        solve=lambda x: torch.linalg.solve(x, x), inv=torch.inverse, det=torch.det,
        resize=lambda x: F.interpolate(x, scale_factor=1.7, mode='bicubic'),
        nearest=lambda x: F.interpolate(x, scale_factor=2), glu=F.glu, huber=lambda x: F.huber_loss(x, x*2))
    for n,f in fs.items():
        move = (lambda *args: deepcopy(f).to(*args)) if isinstance(f, nn.Module) else lambda *args: f
        ours,exact,xd = move(dev),move(torch.float64),x.to(dev)
        with ctx(), count_xla() as c: y,e = ours(xd),exact(x.double())
        assert not c.fallbacks and not y.requires_grad and error(y.cpu(), e) < 1e-5, n

views = dict(plain=lambda t: t, slice=lambda t: torch.cat([t, t], 1)[:,t.shape[1]:], select=lambda t: torch.stack([t, t+1])[1],
    permuted=lambda t: t.permute(*range(1, t.dim()), 0).contiguous().permute(-1, *range(t.dim()-1)))

@pytest.mark.parametrize('ctx', [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize('view', views)
def test_views_in_and_out(ctx, view):
    "Inputs that are views, and views of what comes out; in inference mode the inputs are made within it"
    x = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(0))
    fs = dict(grid=lambda x: F.grid_sample(x, x[:,:2].permute(0, 2, 3, 1)*.3, align_corners=False), glu=lambda x: F.glu(x, 1),
        diagonal=lambda x: x.diagonal(), einsum=lambda x: torch.einsum('abcc->abc', x), layer_norm=lambda x: F.layer_norm(x, (5,)),
        group_norm=lambda x: F.group_norm(x, 2), attention=lambda x: F.scaled_dot_product_attention(x, x, x),
        bn=lambda x: F.batch_norm(x, x.new_zeros(6), x.new_ones(6)), resize=lambda x: F.interpolate(x, scale_factor=2, mode='bilinear'),
        cumsum=lambda x: (x > 0).cumsum(1).to(x.dtype), norm=lambda x: x.norm(dim=1),
        huber=lambda x: F.huber_loss(x, x*2, reduction='none'))
    run = lambda f, x: f(views[view](x+0))[1:].flatten(1)
    with ctx(): got = fetch([run(f, x.to(dev)) for f in fs.values()])
    for (n,f),y in zip(fs.items(), got): assert error(y, run(f, x.double())) < 1e-5, n

# Grid sampling

grid_modes = list(itertools.product(('bilinear', 'nearest', 'bicubic'), ('zeros', 'border', 'reflection'), (True, False)))

def grid_results(x, grid, **kw):
    x,grid = x.clone().requires_grad_(),grid.clone().requires_grad_()
    y = F.grid_sample(x, grid, **kw)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), [x, grid])]

@pytest.mark.parametrize('shape,out', [((2,3,7,5), (6,4)), ((1,1,1,4), (3,3)), ((3,2,8,8), (8,8)), ((2,2,4,5,3), (3,4,2))])
def test_grid_sample(shape, out):
    torch.manual_seed(0)
    x,grid = torch.randn(shape),torch.rand(shape[0], *out, len(out))*4-2
    modes = [k for k in grid_modes if len(out) == 2 or k[0] != 'bicubic']
    with count_xla() as c:
        actual = fetch([grid_results(x.to(dev), grid.to(dev), mode=m, padding_mode=p, align_corners=a) for m,p,a in modes])
    assert not c.fallbacks
    for (m,p,a),ac in zip(modes, actual):
        expected = grid_results(x.double(), grid.double(), mode=m, padding_mode=p, align_corners=a)
        assert max(error(v, e) for v,e in zip(ac, expected)) < 5e-6, (m, p, a)

def test_grid_sample_identity():
    "At the pixels themselves, and at the border, where PyTorch's clipping has a gradient of its own"
    x,grid = torch.randn(2, 3, 5, 5),F.affine_grid(torch.eye(2, 3).expand(2, 2, 3), (2,3,5,5), align_corners=True)
    for p in ('zeros', 'border', 'reflection'):
        actual,expected = (grid_results(x.to(d), grid.to(d), padding_mode=p, align_corners=True, mode='bilinear') for d in (dev, 'cpu'))
        assert max(error(a, e) for a,e in zip(fetch(actual)[:2], expected)) < 5e-6
        assert p == 'reflection' or error(fetch(actual)[2], expected[2]) < 5e-6

def test_grid_sample_types():
    x,grid = torch.randn(2, 3, 7, 5),torch.rand(2, 6, 4, 2)
    for dtype,tol in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        xd,gd = x.to(dtype),grid.to(dtype)
        y = F.grid_sample(xd.to(dev), gd.to(dev), align_corners=False)
        assert y.dtype == dtype and error(y.cpu(), F.grid_sample(xd.double(), gd.double(), align_corners=False)) < tol
    with torch.inference_mode(), count_xla() as c: F.grid_sample(x.to(dev), grid.to(dev), align_corners=False)
    assert not c.fallbacks

# Solves

@pytest.mark.parametrize('n', [1, 2, 3, 8, 32])
def test_solve(n):
    torch.manual_seed(n)
    a,b = torch.randn(32, n, n),torch.randn(32, n, 2)
    exact = torch.linalg.solve(a.double(), b.double())
    relative = lambda x: (x.double()-exact).flatten(1).norm(dim=1)/exact.flatten(1).norm(dim=1)
    with count_xla() as c:
        x,inv,det = torch.linalg.solve(a.to(dev), b.to(dev)),torch.inverse(a.to(dev)),torch.det(a.to(dev))
        assert c.executions == 0
    assert c.n_fallbacks == c.to_host == 0
    bound = torch.finfo(a.dtype).eps*torch.linalg.cond(a.double())   # of a backward stable solve, for each matrix
    assert (relative(x.cpu()) < bound).all() and (relative(torch.linalg.solve(a, b)) < bound).all()
    assert error(det.cpu(), torch.det(a.double())) < 1e-4

def test_solve_hard():
    "Hilbert's matrix, and one that has no solution without pivoting"
    i = torch.arange(1., 6)
    hilbert,b = 1/(i[:,None]+i-1),torch.ones(5, 1)
    exact = torch.linalg.solve(hilbert.double(), b.double())
    assert error(torch.linalg.solve(hilbert.to(dev), b.to(dev)).cpu(), exact) < 10*max(error(torch.linalg.solve(hilbert, b), exact), 1e-5)
    swap = torch.tensor([[0.,1.],[1.,0.]])
    assert torch.linalg.solve(swap.to(dev), torch.tensor([2.,3.]).to(dev)).cpu().allclose(torch.tensor([3.,2.]))

def test_solve_without():
    a = torch.randn(2, 3, 3).to(dev)
    with without_lowerings('solve', 'det'), count_xla() as c: torch.linalg.solve(a, a), torch.det(a)
    assert set(c.fallbacks) == {'aten::_linalg_solve_ex', 'aten::_linalg_det'}

# Types and numbers that are seldom given

z,ints,few = torch.randn(3, 3, dtype=torch.complex64),torch.arange(9).view(3, 3),torch.tensor([True, False, True])
by_type = dict(
    norm_0=(lambda x: (x.norm(0), torch.linalg.vector_norm(x, 0, 1, dtype=torch.float64)), torch.randn(4, 400).round()),
    exp2=(torch.exp2, z), cov=(torch.cov, ints), corrcoef=(torch.corrcoef, ints), fmax=(lambda x: torch.fmax(x, ~x), few),
    addmm=(lambda x: torch.addmm(x, x, x, alpha=.6, beta=2.5), ints), addmv=(lambda x: torch.addmv(x[0], x, x[1], alpha=1.6), ints),
    addbmm=(lambda x: torch.addbmm(x, x[None], x[None], alpha=.6), ints),
    amax=(lambda x: (~x).scatter_reduce(0, torch.zeros_like(x, dtype=torch.long), x, 'amax', include_self=False), few),
    amin=(lambda x: (~x).scatter_reduce(0, torch.zeros_like(x, dtype=torch.long), x, 'amin', include_self=False), few))

@pytest.mark.parametrize('name', by_type)
def test_seldom_types(name):
    f,x = by_type[name]
    for got,want in zip(*(o if isinstance(o, tuple) else (o,) for o in (f(x.to(dev)), f(x))), strict=True):
        assert got.dtype == want.dtype and torch.allclose(got.cpu(), want, rtol=1e-5)
