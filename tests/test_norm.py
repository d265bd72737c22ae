"""RunningBatchNorm against statistics worked out in float64, and against the versions of lesson 10 and its forum thread

Those show each fault."""
import math
from copy import deepcopy
import numpy as np
import pytest, torch
from torch import nn
import torch.nn.functional as F
from fastai.vision.all import *
from sklearn.datasets import load_digits
from fastai_xla.all import *
from norms import *

# Against float64

class Reference:
    "All samples so far with their weights; the gradient as what a least-squares fit on (1, x) leaves"
    def __init__(self, mom=.1, eps=1e-5): self.mom,self.eps,self.batches,self.weights = mom,eps,[],[]
    def add(self, x):
        fade = (1-self.mom)**math.sqrt(len(x)/32)
        self.batches,self.weights = self.batches+[self.rows(x)],[w*fade for w in self.weights]+[1.]
    def rows(self, x): return np.moveaxis(np.asarray(x, dtype=np.float64), 1, -1).reshape(-1, x.shape[1])
    def stats(self):
        w = np.concatenate([np.full(len(b), wi*1.) for b,wi in zip(self.batches, self.weights)])[:,None]
        x = np.concatenate(self.batches)
        mean = (w*x).sum(0)/w.sum()
        return mean,(w*(x-mean)**2).sum(0)/w.sum()
    def __call__(self, x, weight, bias, dy):
        mean,var = self.stats()
        xh,g,dx = (self.rows(x)-mean)/np.sqrt(var+self.eps),self.rows(dy),[]
        for c in range(x.shape[1]):
            (b0,b1),*_ = np.linalg.lstsq(np.stack([np.ones(len(xh)), xh[:,c]], 1), g[:,c], rcond=None)
            s = max(xh[:,c].var(), 1)
            b1 = b1*min(xh[:,c].var(), 1)
            fit = g[:,c].mean() + b1*(xh[:,c]-xh[:,c].mean())
            dx.append((g[:,c]-fit*len(x)/(len(x)+.5))*weight[c]/np.sqrt((var[c]+self.eps)*s))
        back = lambda r: np.moveaxis(r.reshape(x.shape[0], *x.shape[2:], x.shape[1]), -1, 1)
        return back(xh*weight+bias),back(np.stack(dx, 1)),(g*xh).sum(0),g.sum(0)

def run_both(m, shape, dev='cpu', n=9, scales=(1, 2.5), seed=0):
    "Train steps of `m` and of the reference, batches that change in place, scale and size"
    g,ref = torch.Generator().manual_seed(seed),Reference()
    with torch.no_grad():
        m.weight.copy_(torch.rand(shape[1], generator=g)+.5)
        m.bias.copy_(torch.randn(shape[1], generator=g))
    w,b = [p.detach().double().numpy() for p in (m.weight, m.bias)]
    m.to(dev)
    for i in range(n):
        x = torch.randn(shape[0]-i%2, *shape[1:], generator=g)*scales[i%2]+i/3
        dy = torch.randn(x.shape, generator=g)+.3*x
        if m.step_key() in ((True,), ('always',)): ref.add(x)
        xd = x.clone().to(dev).requires_grad_()
        y = m(xd)
        dx,dw,db = torch.autograd.grad(y, [xd, m.weight, m.bias], dy.to(dev))
        for a,e in zip((y, dx, dw, db), ref(x, w, b, dy)): close(a, e)
        for a,e in zip((m.running_mean, m.running_var), ref.stats()): close(a, e)
    return ref

@pytest.mark.parametrize('dev', ['cpu', 'xla'])
@pytest.mark.parametrize('cls,shape', [(RunningBatchNorm1d, (6, 5)), (RunningBatchNorm1d, (4, 5, 7)), (RunningBatchNorm2d, (3, 5, 4, 6)),
                                       (RunningBatchNorm3d, (3, 2, 3, 4, 2)), (RunningBatchNorm, (4, 3, 2, 2, 2, 2))])
def test_float64(cls, shape, dev):
    run_both(cls(shape[1]), shape, device() if dev == 'xla' else dev, n=5 if dev == 'xla' else 9)

@pytest.mark.parametrize('dev', ['cpu', 'xla'])
def test_float64_skipping(dev):
    m = RunningBatchNorm2d(4, update_every=3, warmup=8)
    ref = run_both(m, (5, 4, 4, 4), device() if dev == 'xla' else dev)
    test_eq(len(ref.batches), 4)   # steps 0 and 1 (9 samples), 3 and 6

def test_no_affine_and_double():
    m,a = RunningBatchNorm2d(4, affine=False),RunningBatchNorm2d(4).double()
    x = torch.randn(4, 4, 5, 5)
    close(m(x), a(x.double()).detach())
    test_eq([*m.parameters()], [])
    test_eq([a.running_mean.dtype, a(x.double()).dtype], [torch.float64]*2)

@pytest.mark.parametrize('dev', ['cpu', 'xla'])
@pytest.mark.parametrize('mean', [0, 100, 1000])
def test_large_mean(mean, dev):
    m,ref,old,old64 = RunningBatchNorm2d(4).to(device() if dev == 'xla' else dev),Reference(),Lesson10(4),Lesson10(4).double()
    g = torch.Generator().manual_seed(mean)
    for i in range(10):
        x = torch.randn(8, 4, 16, 16, generator=g)+mean
        m(x.to(m.weight.device)), ref.add(x), old(x), old64(x.double())
    exact = ref.stats()[1]
    close(m.running_var/torch.as_tensor(exact).float().to(m.weight.device), np.ones(4))
    var,var64 = [l.sqrs/l.count-(l.sums/l.count)**2 for l in (old, old64)]
    assert ((var/var64-1).abs().max() > 1e-2) == (mean == 1000)   # the control loses the digits

def test_against_batchnorm():
    "The first step, with all of the gradient's share: as torch's own kernel"
    x,dy = torch.randn(64, 4, 6, 6)*3+2,torch.randn(64, 4, 6, 6)
    def grads(m):
        xi = x.clone().requires_grad_()
        return torch.autograd.grad(m(xi), [xi, *m.parameters()], dy)
    (a,*ap),(b,*bp) = grads(RunningBatchNorm2d(4)),grads(nn.BatchNorm2d(4))
    for p,q in zip(ap, bp): test_close(p, q, eps=1e-3)
    plain, = torch.autograd.grad(F.batch_norm(xi := x.clone().requires_grad_(), x.mean((0,2,3)), x.var((0,2,3), correction=0)), xi, dy)
    test_close(a, b+(plain-b)*.5/64.5, eps=1e-5)

# The thread's faults

def test_batches_of_one():
    with pytest.raises(ZeroDivisionError): Lesson10(3)(torch.randn(1, 3, 4, 4))
    for m,shape in ((RunningBatchNorm2d(3), (1, 3, 4, 4)), (RunningBatchNorm1d(3), (1, 3)), (RunningBatchNorm2d(3), (1, 3, 1, 1))):
        m = nn.Sequential(m)
        for i in range(30):
            x = torch.randn(shape).requires_grad_()
            m(x).square().sum().backward()
            assert x.grad.isfinite().all() and m(x).isfinite().all()
            assert x.grad.abs().max() < 100
        assert x.grad.abs().max() > 0   # something is left of the gradient even where the batch is one number

def test_dense_net_learns_from_single_samples():
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    y = (x[:,:2].prod(1) > 0).long()
    m = nn.Sequential(nn.Linear(8, 64), RunningBatchNorm1d(64), nn.ReLU(),
                      nn.Linear(64, 32), RunningBatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    opt = torch.optim.SGD(m.parameters(), lr=.02)
    for i in torch.cat([torch.randperm(512) for _ in range(6)]):
        F.cross_entropy(m(x[i][None]), y[i][None]).backward()
        opt.step()
        opt.zero_grad()
    assert (m.eval()(x).argmax(1) == y).float().mean() > .9

def test_statistics_follow():
    x = torch.randn(8, 3, 4, 4)
    old,m = Thread(3),RunningBatchNorm2d(3)
    for l in (old, m): l(x)
    assert 'means' not in old.state_dict() and old.double().means.dtype == torch.float32   # the control leaves them behind
    fresh = RunningBatchNorm2d(3)
    fresh.load_state_dict(m.state_dict())
    assert torch.equal(fresh.eval()(x), m.eval()(x))
    assert {b.dtype for b in m.double().buffers()} == {torch.float64}
    test_eq({b.device.type for b in m.float().to(device()).buffers()}, {'xla'})
    assert not fresh.load_state_dict(m.state_dict()).missing_keys

def test_deepcopy_after_training():
    old,m,x = Thread(3),RunningBatchNorm2d(3, update_every=2, warmup=0),torch.randn(8, 3, 4, 4, requires_grad=True)
    for l in (old, m): l(x).sum().backward()
    with pytest.raises(RuntimeError, match='deepcopy'): deepcopy(old)
    c = deepcopy(m)
    for i in range(5):
        x = torch.randn(8, 3, 4, 4)
        assert torch.equal(m(x), c(x)) and c.step_key() == m.step_key()

def test_two_forwards_one_backward():
    xs = torch.randn(2, 8, 3, 4, 4)
    old,m = Thread(3),RunningBatchNorm2d(3)
    xs.requires_grad_()
    with pytest.raises(RuntimeError, match='inplace operation'): (old(xs[0]).pow(2).sum()+old(xs[1]).pow(2).sum()).backward()
    m2,xs2 = deepcopy(m),xs.detach().clone().requires_grad_()
    (m(xs[0]).pow(3).sum()+m(xs[1]).pow(3).sum()).backward()
    for x in xs2: m2(x).pow(3).sum().backward()      # accumulated instead
    test_close(m.weight.grad, m2.weight.grad, eps=1e-2)
    close(xs.grad, xs2.grad)

def test_eval_before_training():
    x = torch.randn(4, 3, 5, 5)
    assert Lesson10(3).eval()(x).isnan().any()
    close(RunningBatchNorm2d(3).eval()(x), nn.BatchNorm2d(3).eval()(x).detach())

def digits(size=16):
    d = load_digits()
    x,y = F.interpolate(torch.tensor(d.images[:,None]).float(), size=size, mode='bilinear'),torch.tensor(d.target)
    i = torch.randperm(len(x), generator=torch.Generator().manual_seed(42))
    x = (x-x.mean())/x.std()
    return x[i[:1400]],y[i[:1400]],x[i[1400:]],y[i[1400:]]

def net(norm):
    return nn.Sequential(*[nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), norm(o), nn.ReLU())
                           for i,o,s in ((1, 16, 1), (16, 32, 2), (32, 64, 2))], nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(64, 10))

def train(norm, bs, lr, steps, seed=0):
    "Accuracy, largest weight"
    torch.manual_seed(seed)
    x,y,xv,yv = digits()
    m = net(norm).to(memory_format=torch.channels_last)
    ps = list(m.parameters())
    for l in m.modules():
        if isinstance(l, nn.Conv2d): nn.init.kaiming_normal_(l.weight)
    for i in torch.cat([torch.randperm(1400)[:1400//bs*bs].view(-1, bs) for _ in range(1+steps*bs//1400)])[:steps]:
        F.cross_entropy(m(x[i]), y[i]).backward()
        with torch.no_grad():
            for p in ps:
                p.sub_(p.grad, alpha=lr)
                p.grad = None
    with torch.no_grad(): out = m.eval()(xv)
    return (out.argmax(1) == yv).float().mean().item() if out.isfinite().all() else math.nan,max(p.abs().max().item() for p in ps)

def test_skipping_keeps_weights_bounded():
    (a,w),(a1,w1) = (train(c, 8, .8, 350) for c in (partial(Thread, skip=10), partial(RunningBatchNorm2d, update_every=10)))
    assert not a > .82 and not w < 3 and a1 > .85 and w1 < 2.8, (a, w, a1, w1)

@pytest.mark.parametrize('bs,lr,update_every', [(2, .4, 1), (2, .4, 10), (64, .4, 10)])
def test_digits(bs, lr, update_every):
    acc,largest = train(partial(RunningBatchNorm2d, update_every=update_every), bs, lr, {2: 700, 64: 100}[bs])
    assert acc > .7 and largest < 4, (acc, largest)

def test_early_evaluation():
    "After 10 steps of 64 the statistics already are what training has used"
    accs = {c: np.mean([train(c, 64, .4, 10, seed=s)[0] for s in range(4)]) for c in (nn.BatchNorm2d, RunningBatchNorm2d)}
    assert accs[RunningBatchNorm2d] > accs[nn.BatchNorm2d]+.05, accs
