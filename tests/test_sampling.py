"Langevin dynamics: counts on the device, gradients, and densities with a closed form"
import math
from functools import partial
import fastprogress.fastprogress
import pytest, torch
from torch import nn
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla import transfer

fastprogress.fastprogress.NO_BAR = True
quiet = dict(progress=False)

def bn_energy(seed=0):
    "A small residual net with BatchNorm whose running statistics are far from 0 and 1"
    torch.manual_seed(seed)
    m = nn.Sequential(ConvLayer(1, 8, act_cls=nn.SiLU), ResBlock(1, 8, 8, act_cls=nn.SiLU),
                      ResBlock(1, 8, 16, stride=2, act_cls=nn.SiLU), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(16, 1))
    for b in m.modules():
        if isinstance(b, nn.BatchNorm2d):
            for t,(lo,hi) in zip((b.running_mean, b.running_var, b.weight.data, b.bias.data), ((-1,1),(.2,2),(.5,1.5),(-1,1))):
                t.uniform_(lo, hi)
    return m.eval()

# ---- what it costs

@pytest.mark.parametrize('mala,graphs', [(False, 1), (True, 2)])
def test_one_graph_run_once_per_step(mala, graphs):
    m,x = bn_energy().to(device()),torch.randn(4, 1, 8, 8).to(device())
    sync()
    run = partial(langevin_sample, m, x, mala=mala, **quiet)
    with count_xla() as first: run(1, .1); run(5, [.1,.2,0.3,1.,.01])
    with count_xla() as later: run(1, 1.); run(40, SchedCos(1., .01)); run(17, .3, noise=SchedExp(1., .1))
    assert (first.compiles, first.executions) == (graphs, 6+2*mala)
    assert (later.compiles, later.executions, later.to_host, later.n_fallbacks) == (0, 58+3*mala, 0, 0)

def test_looks_by_the_clock(monkeypatch):
    x = torch.randn(4, 1, 8, 8).to(device())
    m = bn_energy().to(device())
    counts = {}
    for every in (0., 1e9):
        monkeypatch.setattr(transfer, 'look_every', every)
        with count_xla() as c: langevin_sample(m, x, 10, .1)
        counts[every] = c.looks,c.to_host,c.executions-10
    assert counts == {0.: (9,9,0), 1e9: (0,0,0)}

def test_energies_come_home_once():
    m,x = bn_energy().to(device()),torch.randn(4, 1, 8, 8).to(device())
    langevin_sample(m, x, 3, .1, energies=True, **quiet)
    with count_xla() as c: y,e = langevin_sample(m, x, 30, .1, energies=True, **quiet)
    assert (c.compiles, c.executions, c.to_host) == (0, 30, 1)
    assert e.shape == (30, 4) and not is_xla(e) and is_xla(y)
    with torch.no_grad(): torch.testing.assert_close(e[0], m(x)[:,0].cpu(), rtol=1e-5, atol=1e-6)

def test_the_naive_loop_compiles_at_each_step():
    "The control: noise of the host, a float step size, and the energy read at each step"
    w = torch.randn(5, 5).to(device())
    x = torch.randn(4, 5).to(device())
    sync()
    with count_xla() as c:
        for i in range(6):
            x = x.detach().requires_grad_()
            e = (x@w).tanh().pow(2).sum()
            g, = torch.autograd.grad(e, x)
            x = (x - (.1-.01*i)/2*g + .01*torch.randn(4, 5).to(x.device)).detach()
            e.item()
    assert c.compiles == 6 and c.to_host == 6

# ---- the gradient

def gradient(m, x, **kw): return (x-langevin_sample(m, x, 1, 2e3, noise=0, **quiet, **kw))/1e3

def test_gradient_is_that_of_float64():
    m,x = bn_energy(),torch.randn(8, 1, 8, 8)
    expected = gradient(m.double(), x.double())
    actual = gradient(m.float().to(device()), x.to(device())).cpu()
    scale = expected.abs().max()
    assert (actual-expected).abs().max() < 5e-6*scale
    alone = torch.cat([gradient(m, o[None].to(device())) for o in x]).cpu()   # no sample leaks into another
    assert (alone-expected).abs().max() < 5e-6*scale

def test_train_mode_has_another_gradient():
    "The control: what would come out if train mode were let through"
    m,x = bn_energy().double(),torch.randn(8, 1, 8, 8).double()
    expected,xt = gradient(m, x),x.clone().requires_grad_()
    leaky, = torch.autograd.grad(m.train()(xt).sum(), xt)
    assert torch.cosine_similarity(leaky.flatten(), expected.flatten(), 0) < .5

@pytest.mark.parametrize('wrap', [noop, lambda m: nn.Sequential(m), lambda m: lambda x: -m(x)], ids=['module', 'nested', 'function'])
@pytest.mark.parametrize('dev', ['cpu', 'xla'])
def test_train_mode_is_refused(dev, wrap):
    m = bn_energy().to(dev)
    state = {k: v.clone().cpu() for k,v in m.state_dict().items()}
    m[0].train()
    with pytest.raises(RuntimeError, match=r'(?s)train mode.*BatchNorm.*statistics.*model\.eval\(\)'):
        langevin_sample(wrap(m), torch.randn(4, 1, 8, 8).to(dev), 3, .1, **quiet)
    assert all(torch.equal(v.cpu(), state[k]) for k,v in m.state_dict().items()), 'nothing has moved'
    m.eval()
    langevin_sample(m, torch.randn(4, 1, 8, 8).to(dev), 1, .1, **quiet)
    m.train()(torch.randn(4, 1, 8, 8).to(dev))   # and afterwards modules may train again

def test_statistics_and_gradients_of_the_model_stay():
    m,x = bn_energy().to(device()),torch.randn(4, 1, 8, 8).to(device())
    p,q = m[0][0].weight,m[-1].weight
    p.requires_grad_(False)
    q.grad = torch.ones_like(q)
    state,x0 = {k: v.clone() for k,v in m.state_dict().items()},x.clone()
    with torch.no_grad(): y = langevin_sample(m, x, 3, .1, **quiet)
    assert not p.requires_grad and q.requires_grad and not y.requires_grad
    assert [o.grad is None for o in m.parameters()] == [o is not q for o in m.parameters()] and (q.grad == 1).all()
    assert all((v == state[k]).all() for k,v in m.state_dict().items()) and (x == x0).all() and not (y == x).any()

# ---- densities with a closed form

cov = torch.tensor([[1.,.9],[.9,2.]], dtype=torch.double)
def gaussian(x, mean=(1.,-2.)):
    d = x-torch.tensor(mean).to(x)
    return ((d@torch.linalg.inv(cov).to(x.dtype).to(x.device))*d).sum(1)/2

weights,centres = torch.tensor([.2,.5,.3]),torch.tensor([[-1.7,0.],[1.7,0.],[0.,2.5]])
def mixture(x, sigma=torch.zeros(()), sep=1.):
    var = 1+sigma**2
    return -torch.logsumexp(weights.log().to(x.device) - (x[:,None]-sep*centres.to(x.device)).pow(2).sum(-1)/(2*var) - var.log(), 1)

def masses(x, sep=1.): return ((x[:,None]-sep*centres.to(x)).pow(2).sum(-1).argmin(1)[:,None] == torch.arange(3)).double().mean(0)

def exact_masses(n=400000, sep=1.):
    g = torch.Generator().manual_seed(5)
    k = torch.multinomial(weights, n, True, generator=g)
    x = sep*centres[k]+torch.randn(n, 2, generator=g)
    return x.mean(0).double(),x.T.cov().double(),masses(x, sep)

def se(n): return 1/math.sqrt(n)

forms = dict(plain=dict(n_steps=1000, step_size=.03), annealed=dict(n_steps=1000, step_size=SchedPoly(.5, .02, .5)),
             mala=dict(n_steps=300, step_size=.6, mala=True))

@pytest.mark.parametrize('form', forms)
def test_gaussian(form):
    torch.manual_seed(1)
    n = 10000
    x = langevin_sample(gaussian, torch.zeros(n, 2), **forms[form], **quiet).double()
    bias = 0. if form == 'mala' else .02   # of the discretisation: (1-step/(4 var))^-1, var > .43
    assert (x.mean(0)-torch.tensor([1.,-2.])).abs().max() < 5*2**.5*se(n)
    assert (x.T.cov()-cov).abs().max() < 5*2*2**.5*se(n) + bias

@pytest.mark.parametrize('form', ['plain', 'mala'])
def test_mixture(form):
    torch.manual_seed(2)
    n = 4000
    start = centres[:1].repeat(n, 1)   # all in the lightest mode
    x = langevin_sample(mixture, start, **{**forms[form], 'n_steps': 3*forms[form]['n_steps']}, **quiet)
    mean,c,w = exact_masses()
    bias = 0. if form == 'mala' else .03
    assert (masses(x)-w).abs().max() < 5*.5*se(n) + bias/3
    assert (x.mean(0)-mean).abs().max() < 5*1.7*se(n) + bias
    assert (x.T.cov()-c).abs().max() < 5*1.7**2*2**.5*se(n) + bias

def test_plain_step_has_the_known_bias_and_mala_has_none():
    "On a Gaussian of variance v the plain form settles at v/(1-step/(4v))"
    torch.manual_seed(3)
    n,v,step = 20000,.5,1.
    energy = lambda x: x.pow(2).sum(1)/(2*v)
    var = {m: langevin_sample(energy, torch.zeros(n, 1), 100, step, mala=m, **quiet).var().item() for m in (False, True)}
    tol = 5*2**.5*se(n)
    assert abs(var[False]/(v/(1-step/(4*v))) - 1) < tol and abs(var[True]/v - 1) < tol
    assert var[False]/v - 1 > 10*tol

@pytest.mark.parametrize('mala', [False, True])
def test_noise_is_a_temperature(mala):
    "The control of the noise's factor: with half of it the variance is a quarter, with the root of 2 it is double"
    torch.manual_seed(4)
    n,steps,size = 10000,*((300, .3) if mala else (700, .03))
    for k in (.5, 2**.5):
        x = langevin_sample(gaussian, torch.zeros(n, 2), steps, size, noise=size**.5*k, mala=mala, **quiet).double()
        assert (x.T.cov()/k**2-cov).abs().max() < 5*2*2**.5*se(n) + (0 if mala else .03)

def test_annealing_crosses_where_plain_chains_are_stuck():
    torch.manual_seed(6)
    n,sep = 3000,4.
    start = x = sep*centres[:1].repeat(n, 1)
    f = partial(mixture, sep=sep)
    for s in torch.linspace(8, 0, 17): x = langevin_sample(f, x, 60, (.5*(1+s**2)).item(), sigma=s, mala=True, **quiet)
    stuck = langevin_sample(f, start, 1020, .5, mala=True, **quiet)
    assert (masses(x, sep)-weights).abs().max() < 5*.5*se(n)+.02
    assert masses(stuck, sep)[0] > .99

def test_box():
    "A flat energy within limits: uniform with `mala`; without, samples pile up at the limits"
    torch.manual_seed(7)
    flat = lambda x: (x*0).sum(1)
    x = {m: langevin_sample(flat, torch.full((20000, 1), .5), 200, .05, clip=(0,1), mala=m, **quiet) for m in (False, True)}
    assert abs(x[True].mean()-.5) < .01 and abs(x[True].var()*12-1) < .03 and ((x[True] > 0) & (x[True] < 1)).all()
    assert ((x[False] == 0) | (x[False] == 1)).float().mean() > .1

def test_clipped_gradient_stays_exact_with_mala():
    torch.manual_seed(8)
    n = 10000
    x = langevin_sample(gaussian, torch.zeros(n, 2), 600, .4, mala=True, clip_grad=.5, **quiet).double()
    assert (x.T.cov()-cov).abs().max() < 5*2*2**.5*se(n)
    y = langevin_sample(gaussian, torch.full((3, 2), 50.), 1, 1., noise=0., clip_grad=.5, **quiet)
    assert torch.allclose((50-y).abs(), torch.full((3, 2), .25))

@pytest.mark.parametrize('mala', [False, True])
def test_density_on_the_device(mala):
    n = 5000
    manual_seed(9)
    x = langevin_sample(gaussian, torch.zeros(n, 2).to(device()), 300, .4 if mala else .05, mala=mala, **quiet).cpu().double()
    assert (x.mean(0)-torch.tensor([1.,-2.])).abs().max() < 5*2**.5*se(n)
    assert (x.T.cov()-cov).abs().max() < 5*2*2**.5*se(n) + (0 if mala else .04)

def test_seed_of_the_device():
    x = torch.zeros(5, 2).to(device())
    def run(seed):
        manual_seed(seed)
        return langevin_sample(gaussian, x, 5, .1, **quiet).cpu()
    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))

# ---- arguments and errors

def test_arguments():
    x = TensorImage(torch.randn(4, 3))
    y = langevin_sample(lambda x, a, b: (a*x).sum(1)+b, x, 2, .1, noise=0., a=2., b=1., **quiet)
    assert type(y) is TensorImage and torch.allclose(y, x-.2)
    assert langevin_sample(gaussian, torch.zeros(3, 2), 0, .1) .shape == (3, 2)
    assert langevin_sample(lambda x: x**2/2, torch.zeros(3), 2, .1, mala=True, **quiet).shape == (3,)
    m,c = nn.Linear(3, 5).eval(),torch.tensor([0,4,1,1])
    down = langevin_sample(partial(class_energy, m), torch.zeros(4, 3), 1, 2., noise=0., y=c, **quiet)
    torch.testing.assert_close(down, m.weight[c].detach())
    torch.testing.assert_close(class_energy(m, torch.ones(4, 3)), -m(torch.ones(4, 3)).exp().sum(1).log())

@pytest.mark.parametrize('kw,err,match', [
    (dict(energy=nn.Linear(2, 10).eval()), ValueError, r'shape \(4, 10\) for 4 samples.*class_energy'),
    (dict(energy=lambda x: x.detach().sum(1)), ValueError, 'does not depend on x'),
    (dict(x=torch.ones(4, 2, dtype=torch.long)), TypeError, r'int64.*x\.float\(\)'),
    (dict(step_size=[.1,.2]), ValueError, 'step_size has 2 values for 3 steps'),
    (dict(noise=[.1]*4), ValueError, 'noise has 4 values for 3 steps'),
    (dict(noise=0., mala=True), ValueError, 'mala=True')])
def test_errors(kw, err, match):
    with pytest.raises(err, match=match): langevin_sample(**(dict(energy=gaussian, x=torch.zeros(4, 2), n_steps=3, step_size=.1) | kw))
