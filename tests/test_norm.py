"""RunningBatchNorm against statistics worked out in float64, and against the versions of lesson 10 and its forum thread

Those show each fault. Then conversions, and fastai's layers."""
import io, math, warnings
from copy import deepcopy
import numpy as np
import own_process, pytest, torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from fastcore.test import *
from fastai.vision.all import *
from fastai.torch_core import norm_bias_params
from sklearn.datasets import load_digits
from fastai_xla.all import *
from fastai_xla.norm import *
from fastai_xla.convert import *
from fastai_xla.runtime import *
from fastai_xla.transfer import *
from common import *
from probe import *

torch.set_num_threads(1)
device()

# The controls

class Lesson10(nn.Module):
    "As in lesson 10"
    def __init__(self, nf, mom=.1, eps=1e-5):
        super().__init__()
        self.mom,self.eps = mom,eps
        self.mults,self.adds = nn.Parameter(torch.ones(nf, 1, 1)),nn.Parameter(torch.zeros(nf, 1, 1))
        for n in ('sums', 'sqrs'): self.register_buffer(n, torch.zeros(1, nf, 1, 1))
        for n in ('batch', 'count', 'step'): self.register_buffer(n, torch.tensor(0.))
    def update_stats(self, x):
        bs,nc,*_ = x.shape
        self.sums.detach_(); self.sqrs.detach_()
        s,ss,c = x.sum((0,2,3), keepdim=True),(x*x).sum((0,2,3), keepdim=True),self.count.new_tensor(x.numel()/nc)
        mom1 = s.new_tensor(1-(1-self.mom)/math.sqrt(bs-1))
        self.sums.lerp_(s, mom1); self.sqrs.lerp_(ss, mom1); self.count.lerp_(c, mom1)
        self.batch += bs
        self.step += 1
    def forward(self, x):
        if self.training: self.update_stats(x)
        means = self.sums/self.count
        var = (self.sqrs/self.count).sub_(means*means)
        if bool(self.batch < 20): var.clamp_min_(.01)
        return (x-means).div_((var.add_(self.eps)).sqrt()).mul_(self.mults).add_(self.adds)

class Thread(nn.Module):
    "The version of the thread that skips, one step in `skip`"
    def __init__(self, nf, mom=.1, eps=1e-5, skip=2):
        super().__init__()
        self.mom,self.eps,self.skip = mom,eps,skip
        self.mults,self.adds = nn.Parameter(torch.ones(nf, 1, 1)),nn.Parameter(torch.zeros(nf, 1, 1))
        for n in ('sums', 'sqrs'): self.register_buffer(n, torch.zeros(1, nf, 1, 1))
        self.register_buffer('count', torch.tensor(0.))
        self.batch = self.iter = 0
    def update_stats(self, x):
        bs,nc,*_ = x.shape
        self.batch += bs
        self.iter += 1
        if self.batch > 1000 and self.iter % self.skip:
            self.means.detach_(); self.stds.detach_()
            return
        self.sums.detach_(); self.sqrs.detach_()
        s,ss,c = x.sum((0,2,3), keepdim=True),(x*x).sum((0,2,3), keepdim=True),x.new_tensor(x.numel()/nc)
        mom1 = s.new_tensor(1-(1-self.mom)**(bs/32))
        self.sums.lerp_(s, mom1); self.sqrs.lerp_(ss, mom1); self.count.lerp_(c, mom1)
        self.means = self.sums/self.count
        self.stds = ((self.sqrs/self.count).sub_(self.means.pow(2)).clamp_min_(0) + self.eps).sqrt()
        if self.batch < 20: self.stds = self.stds.clamp_min(.1)
    def forward(self, x):
        if self.training: self.update_stats(x)
        factor = self.mults/self.stds
        return x*factor + self.adds-self.means*factor

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

def close(actual, expected, tol=1e-5):
    e = torch.as_tensor(np.asarray(expected))
    err = (actual.detach().cpu().double()-e).abs().max().item()/max(e.abs().max().item(), 1e-12)
    assert err < tol, err

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
        if m.step_key() == (True,): ref.add(x)
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
@pytest.mark.parametrize('mean', [0, 10, 100, 1000])
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
    old,new = [[train(c, 8, .8, 350, seed=s) for s in range(2)]
               for c in (partial(Thread, skip=10), partial(RunningBatchNorm2d, update_every=10))]
    for (a,w),(a1,w1) in zip(old, new): assert not a > .82 and not w < 3 and a1 > .85 and w1 < 2.8, (old, new)

@pytest.mark.parametrize('bs,lr,update_every', [(2, .4, 1), (2, .4, 10), (4, .4, 4), (8, .4, 4), (64, .4, 10)])
def test_digits(bs, lr, update_every):
    acc,largest = train(partial(RunningBatchNorm2d, update_every=update_every), bs, lr, {2: 700, 64: 100}.get(bs, 350))
    assert acc > .7 and largest < 4, (acc, largest)

def test_early_evaluation():
    "After 10 steps of 64 the statistics already are what training has used"
    accs = {c: np.mean([train(c, 64, .4, 10, seed=s)[0] for s in range(4)]) for c in (nn.BatchNorm2d, RunningBatchNorm2d)}
    assert accs[RunningBatchNorm2d] > accs[nn.BatchNorm2d]+.05, accs

# Training on XLA

def xla_costs(make, size=6):
    "Costs of the training steps of a convnet on the device"
    torch.manual_seed(0)
    dev,m = device(),nn.Sequential(*[nn.Sequential(nn.Conv2d(i, 4, 3, padding=1), make()) for i in (1, 4, 4, 4)]).to(device())
    ps,x = list(m.parameters()),torch.randn(8, 1, size, size).to(dev)
    sync()
    costs = []
    for i in range(12):
        with count_xla() as c:
            m(x).sigmoid().mean().backward()
            with torch.no_grad():
                for p in ps:
                    p.sub_(p.grad*.1)
                    p.grad = None
            sync()
        costs.append(c)
    return costs

def test_lesson10_cuts_the_step():
    "The control: a tensor in an `if` in each layer"
    assert xla_costs(partial(Lesson10, 4))[-1].executions >= 5

@pytest.mark.parametrize('update_every', [1, 4])
def test_one_execution_per_step(update_every):
    # a size of its own: no graph is known yet
    costs = xla_costs(partial(RunningBatchNorm2d, 4, update_every=update_every, warmup=16), size=6+update_every)
    test_eq([c.executions for c in costs], [1]*12)
    test_eq(sum(c.to_host+c.n_fallbacks for c in costs), 0)
    assert sum(c.compiles for c in costs) == (1 if update_every == 1 else 2), costs

def test_learner_on_xla(tmp_path):
    "The contract, the numbers of the CPU, a checkpoint in the middle of a cycle of skipping"
    def learner(dls):
        torch.manual_seed(0)
        learn = image_learner(dls, path=tmp_path, lr=.1)
        convert_norm(learn.model, 'running', update_every=3, warmup=32, verbose=False)
        return learn
    cpu,xla = learner(image_dls(shuffle=False)),learner(image_dls(shuffle=False)).to_xla()
    with xla.added_cbs(Probe()), xla.no_bar():
        xla.fit(2)
        test_eq(breaches(xla.probe.steady(False)), [])
        test_eq(breaches(xla.probe.steady(True, late=1)), [])   # a step without statistics is the second kind
    with cpu.no_bar(): cpu.fit(2)
    for p,q in zip(cpu.model.state_dict().values(), fetch(list(xla.model.state_dict().values()))): close(q.float(), p.float(), 1e-3)
    xla.save('half')
    other = learner(image_dls(shuffle=False)).to_xla()
    other.load('half')
    for a in (xla, other):
        with a.no_bar(): a.fit(1)
    for p,q in zip(fetch(list(xla.model.state_dict().values())), fetch(list(other.model.state_dict().values()))): assert torch.equal(p, q)

# Ways of training

@pytest.mark.parametrize('update_every', [1, 3])
def test_save_and_go_on(update_every):
    make = lambda: nn.Sequential(nn.Conv2d(3, 4, 3), RunningBatchNorm2d(4, update_every=update_every, warmup=8))
    a,b,data = make(),make(),torch.randn(14, 4, 3, 6, 6)
    def step(m, x):
        m(x).sigmoid().square().mean().backward()
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(p.grad)
                p.grad = None
    for x in data[:7]: step(a, x)
    f = io.BytesIO()
    torch.save(a.state_dict(), f)
    f.seek(0)
    b.load_state_dict(torch.load(f, weights_only=True))
    for x in data[7:]: step(a, x), step(b, x)
    for (k,p),q in zip(a.state_dict().items(), b.state_dict().values()): assert torch.equal(p, q), k
    c = make()                                # the control: without the counters the cycle is another
    c.load_state_dict({k: v*0 if 'extra' in k else v for k,v in a.state_dict().items()})
    if update_every == 3: assert c[1].step_key(4, 4) != a[1].step_key(4, 4)

@pytest.mark.parametrize('reentrant', [True, False])
def test_checkpointing(reentrant):
    def grads(m, ck):
        x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for i in range(3):
            y = checkpoint(m, x, use_reentrant=reentrant) if ck else m(x)
            y.pow(3).sum().backward()
        return [x.grad, *[p.grad for p in m.parameters()], *m.state_dict().values()]
    for update_every in (1, 2):
        m = nn.Sequential(nn.Conv2d(3, 4, 3), RunningBatchNorm2d(4, update_every=update_every, warmup=0), nn.ReLU())
        for a,b in zip(grads(deepcopy(m), True), grads(deepcopy(m), False)): assert torch.equal(a, b)
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())      # the control counts twice
    test_eq([grads(deepcopy(m), c)[-1].item() for c in (True, False)], [6, 3])

def test_checkpointing_on_xla():
    m = nn.Sequential(nn.Conv2d(3, 4, 3), RunningBatchNorm2d(4)).to(device())
    x = torch.randn(4, 3, 6, 6).to(device()).requires_grad_()
    def run(m, f):
        f(m, x).pow(3).sum().backward()
        return fetch([m[0].weight.grad, m[1].running_var, m[1].count])
    image_learner().to_xla()    # registers the lowerings, checkpoint's among them
    for a,b in zip(run(deepcopy(m), partial(checkpoint, use_reentrant=False)), run(deepcopy(m), lambda m,x: m(x))): close(a, b)

@pytest.mark.parametrize('update_every', [1, 3])
def test_compile(update_every):
    torch._dynamo.reset()
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(3, 4, 3), RunningBatchNorm2d(4, update_every=update_every, warmup=8))
    a,b = m,deepcopy(m)
    counter = torch._dynamo.testing.CompileCounterWithBackend('aot_eager')
    fast = torch.compile(b, backend=counter, fullgraph=update_every == 1)
    frames = []
    for i in range(14):
        x = torch.randn(4, 3, 6, 6)
        for f in (a, fast): f(x).pow(3).sum().backward()
        frames.append(counter.frame_count)
    for p,q in zip(a.parameters(), b.parameters()): close(q.grad, p.grad, 1e-4)
    for (k,p),q in zip(a.state_dict().items(), b.state_dict().values()): close(q.float(), p.float(), 1e-4)
    test_eq(frames[-1], frames[7])             # compiled for good, whatever the counters say

beside = """
import torch, torch._dynamo
from torch import nn
from fastai_xla.mixed import explain_mixed
from fastai_xla.norm import RunningBatchNorm2d
explain_mixed(there := nn.Linear(2, 2))
m = nn.Sequential(nn.Conv2d(1, 4, 3), RunningBatchNorm2d(4, update_every=3))
with torch._dynamo.config.patch(error_on_recompile=True): torch.compile(m, backend='eager')(torch.randn(4, 1, 6, 6))"""

def test_compile_beside_a_learner_on_xla(tmp_path):
    "What names a tensor on the CPU to models on XLA is not followed into another model that is compiled"
    res = own_process.run(['-c', beside], tmp_path)
    assert not res.returncode, res.stderr[-2000:]

def test_sam_and_accumulation():
    m = nn.Sequential(nn.Conv2d(1, 4, 3), RunningBatchNorm2d(4, update_every=2, warmup=0))
    for i in range(6):
        x = torch.randn(8, 1, 6, 6)
        m(x).sigmoid().mean().backward()
        gs = [p.grad.clone() for p in m.parameters()]
        with torch.no_grad():
            for p,g in zip(m.parameters(), gs): p.add_(g, alpha=.05)
        m.zero_grad()
        m(x).sigmoid().mean().backward()
        with torch.no_grad():
            for p,g in zip(m.parameters(), gs): p.sub_(g, alpha=.05).sub_(p.grad)
        m.zero_grad()
    test_eq((m[1].seen, m[1].step), (96, 12))
    assert all(p.isfinite().all() for p in m.parameters())

def test_bfloat16():
    x = torch.randn(16, 8, 6, 6)*2+5
    m,exact = RunningBatchNorm2d(8),RunningBatchNorm2d(8)
    conv = nn.Conv2d(8, 8, 1)
    with torch.autocast('cpu', torch.bfloat16):
        h = conv(x)
        y = m(h)
        y.float().square().sum().backward()
    test_eq([y.dtype, conv.weight.grad.dtype, m.running_var.dtype], [torch.bfloat16, torch.float32, torch.float32])
    exact(h.detach().double())
    close(m.running_var, exact.running_var), close(m.running_mean, exact.running_mean)
    m = m.bfloat16()
    test_eq({b.dtype for b in m.buffers()}, {torch.float32})
    close(m.running_var, exact.running_var)
    test_eq([m(h).dtype, m.weight.dtype], [torch.bfloat16]*2)
    test_eq(RunningBatchNorm2d(8, dtype=torch.bfloat16).running_var.dtype, torch.float32)

def test_channels_last():
    x = torch.randn(4, 8, 6, 6)
    a,b = RunningBatchNorm2d(8),RunningBatchNorm2d(8)
    xl = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    y = b(xl)
    assert y.is_contiguous(memory_format=torch.channels_last)
    close(y, a(x).detach())
    g, = torch.autograd.grad(y.pow(3).sum(), xl)
    assert g.is_contiguous(memory_format=torch.channels_last)

def test_second_derivative():
    "A gradient penalty finds a graph to go back through"
    m,x = nn.Sequential(nn.Conv2d(3, 3, 3), RunningBatchNorm2d(3), nn.Tanh()),torch.randn(4, 3, 6, 6).requires_grad_()
    g, = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
    g.square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in (x, m[0].weight, m[1].weight))

def test_counting_without_running():
    a,b = [RunningBatchNorm1d(3, update_every=4, warmup=10) for _ in range(2)]
    for n in (4, 4, 1, 7, 4, 4, 4, 4, 2, 4):
        test_eq(a.step_key(), b.step_key())
        before = a.running_mean.clone()
        key, = a.step_key()
        a(torch.randn(n, 3))
        test_eq(b.advance(n), key)
        test_eq(torch.equal(before, a.running_mean), not key)
    test_eq((a.seen, a.step), (b.seen, b.step))
    test_eq(RunningBatchNorm1d(3).step_key(), (True,))

def test_average_of_all_batches():
    "`torch.optim.swa_utils.update_bn` asks a norm layer to forget, and then to weigh all batches alike"
    m = nn.Sequential(RunningBatchNorm2d(3))
    xs = [torch.randn(8, 3, 4, 4)*(i+1) for i in range(5)]
    m(xs[0]+100)
    torch.optim.swa_utils.update_bn(xs, m)
    test_eq(m[0].momentum, .1)
    close(m[0].running_var, torch.cat(xs).double().var((0,2,3), correction=0))

# Checkpoints of others

def test_lesson10_checkpoint():
    old = nn.Sequential(nn.Conv2d(1, 4, 3), Lesson10(4))
    for i in range(10): old(torch.randn(8, 1, 6, 6)*2+1)
    with torch.no_grad(): old[1].mults.mul_(1.5), old[1].adds.add_(.3)
    new = nn.Sequential(nn.Conv2d(1, 4, 3), RunningBatchNorm2d(4))
    new.load_state_dict(old.state_dict())
    x = torch.randn(8, 1, 6, 6)
    close(new.eval()(x), old.eval()(x).detach())
    thread = Thread(4)
    untrained = RunningBatchNorm2d(4)
    untrained.load_state_dict(thread.state_dict())
    test_eq((untrained.count.item(), untrained.running_var.tolist()), (0, [1]*4))

def test_batchnorm_checkpoint():
    bn,new = nn.BatchNorm2d(4),RunningBatchNorm2d(4)
    new.load_state_dict(bn.state_dict())
    test_eq(new.count.item(), 0)
    bn(torch.randn(8, 4, 3, 3)+2)
    new.load_state_dict(bn.state_dict())
    x = torch.randn(8, 4, 3, 3)
    close(new.eval()(x), bn.eval()(x).detach())
    with pytest.raises(RuntimeError, match='Missing key'): new.load_state_dict({'weight': torch.ones(4)})

# Conversion

def trained(norm, shape=(8, 6, 4, 4)):
    m = nn.Sequential(nn.Conv2d(6, 6, 1) if len(shape) == 4 else nn.Identity(), norm)
    with torch.no_grad():
        norm.weight.uniform_(.5, 1.5), norm.bias.normal_()
    for i in range(10): m(torch.randn(shape)*2+1)
    return m

@pytest.mark.parametrize('route', [('running', 'batch'), ('frozen', 'batch'), ('running', 'frozen', 'running', 'batch')])
def test_there_and_back(route):
    m,x = trained(nn.BatchNorm2d(6, eps=1e-3, momentum=.2)).eval(),torch.randn(8, 6, 4, 4)
    before = m(x).detach()
    for to in route:
        convert_norm(m, to, verbose=False)
        close(m(x), before)
        assert not m[1].training
    test_eq(type(m[1]), nn.BatchNorm2d)
    test_eq((m[1].eps, m[1].affine, m[1].num_batches_tracked.item() > 0), (1e-3, True, True))
    if 'frozen' not in route: test_eq(m[1].momentum, .2)

def test_parameters_stay_the_same():
    m = trained(nn.BatchNorm2d(6))
    m[1].weight.requires_grad_(False)
    w,b = m[1].weight,m[1].bias
    for to in ('running', 'group', 'running', 'batch'):
        convert_norm(m, to, verbose=False)
        assert m[1].weight is w and m[1].bias is b and not w.requires_grad and b.requires_grad and m[1].training
    m(torch.randn(4, 6, 4, 4)).sum().backward()
    assert b.grad is not None

def test_group():
    m,x = convert_norm(trained(nn.BatchNorm2d(6)), 'group', verbose=False),torch.randn(4, 6, 4, 4)
    test_eq((m[1].num_groups, m[1].affine), (3, True))
    close(m(x), F.group_norm(m[0](x), 3, m[1].weight, m[1].bias).detach())
    for nf,g in ((64, 32), (32, 16), (1, 1), (7, 1), (96, 32), (48, 24)):
        test_eq(convert_norm(nn.BatchNorm1d(nf), 'group', verbose=False).num_groups, g)
    test_eq(convert_norm(nn.BatchNorm2d(64), 'group', groups=8, verbose=False).num_groups, 8)

@pytest.mark.parametrize('to', ['batch', 'running', 'group', 'frozen'])
def test_the_root_and_its_kind(to, capsys):
    for d,cls in ((1, nn.BatchNorm1d), (3, nn.BatchNorm3d)):
        new = convert_norm(cls(4).to(device()).double().eval(), to)
        test_eq(capsys.readouterr().out.count('\n'), 1)
        assert all(t.device.type == 'xla' for t in (*new.parameters(), *new.buffers())) and not new.training
        test_eq({p.dtype for p in (new.weight, new.bias)}, {torch.float64})
        if to == 'running': assert isinstance(new, cls)
        if to == 'frozen': test_eq(type(convert_norm(new, 'batch', verbose=False)), cls)

def test_shared_layer_stays_shared():
    bn = nn.BatchNorm2d(6)
    m = nn.ModuleDict(dict(a=bn, b=nn.Sequential(bn)))
    convert_norm(m, 'running', verbose=False)
    assert m['a'] is m['b'][0] and isinstance(m['a'], RunningBatchNorm2d)

def test_report(capsys):
    m = nn.Sequential(nn.BatchNorm2d(6), nn.GroupNorm(2, 6), nn.LayerNorm(3),
                      nn.InstanceNorm2d(6), nn.BatchNorm2d(6, track_running_stats=False))
    convert_norm(m, 'frozen')
    lines = capsys.readouterr().out.splitlines()
    test_eq([('left' in l) for l in lines], [False, True, True, True, True])
    convert_norm(m, 'running', update_every=4)
    test_eq([type(l).__name__ for l in m], ['RunningBatchNorm2d', 'RunningBatchNorm', 'LayerNorm', 'InstanceNorm2d', 'RunningBatchNorm2d'])
    test_eq(m[0].update_every, 4)
    assert m(torch.randn(4, 6, 3, 3)).isfinite().all()
    convert_norm(m, 'running')
    assert 'already' in capsys.readouterr().out

def test_never_silent():
    for model,to,msg in ((nn.Linear(2, 2), 'running', 'no norm layer'), (nn.LayerNorm(2), 'batch', 'LayerNorm'),
                         (nn.GroupNorm(1, 2), 'frozen', 'no norm layer'), (nn.BatchNorm1d(2), 'Running', 'no such kind')):
        with pytest.raises(ValueError, match=msg): convert_norm(model, to)
    with pytest.raises(TypeError, match='update_every'): convert_norm(nn.BatchNorm1d(2), 'group', update_every=2)
    with pytest.raises(ValueError, match='update_every=0'): RunningBatchNorm(2, update_every=0)
    with pytest.raises(ValueError, match='expected 4D'): RunningBatchNorm2d(2)(torch.randn(2, 2))
    with pytest.raises(ValueError, match=r'x\[None\]'): RunningBatchNorm(2)(torch.randn(2))

@pytest.mark.parametrize('dev', ['cpu', 'xla'])
def test_freeze_bn(dev):
    m,x = trained(nn.BatchNorm2d(6)),torch.randn(8, 6, 4, 4)
    m.eval()
    expected = torch.autograd.grad(m(xi := x.clone().requires_grad_()).pow(3).sum(), [xi, m[0].weight])
    freeze_bn(m, verbose=False).train().to(device() if dev == 'xla' else dev)
    before = fetch({k: v.clone() for k,v in m[1].state_dict().items()})
    xi = x.to(m[0].weight.device).requires_grad_()
    for a,e in zip(torch.autograd.grad(m(xi).pow(3).sum(), [xi, m[0].weight]), expected): close(a, e)
    test_eq(len(list(m[1].parameters())), 0)
    for k,v in fetch(m[1].state_dict()).items(): assert torch.equal(v, before[k])

# fastai

def test_norm_type():
    for d in (1, 2, 3):
        test_eq(type(ConvLayer(2, 4, ndim=d, norm_type=NormType.Running)[1]),
                [RunningBatchNorm1d, RunningBatchNorm2d, RunningBatchNorm3d][d-1])
    torch.manual_seed(0); a = ConvLayer(2, 4, norm_type=NormType.RunningZero, bn_1st=False)
    torch.manual_seed(0); b = ConvLayer(2, 4, norm_type=NormType.BatchZero, bn_1st=False)
    assert torch.equal(a[0].weight, b[0].weight) and a[0].bias is None and isinstance(a[2], RunningBatchNorm2d) and not a[2].weight.any()
    test_eq([NormType.Running, NormType['RunningZero'].name, NormType(7)], [NormType.Running, 'RunningZero', NormType.Running])
    test_eq(pickle.loads(pickle.dumps(NormType.Running)), NormType.Running)
    m = xresnet18(n_out=3)
    convert_norm(m, 'running', verbose=False)
    test_eq({type(l) for l in m.modules() if isinstance(l, nn.BatchNorm2d)}, {RunningBatchNorm2d})

@pytest.mark.parametrize('norm_type', [NormType.Batch, NormType.BatchZero, NormType.Weight, NormType.Instance, NormType.InstanceZero, None])
def test_other_norm_types_are_untouched(norm_type):
    for make in (lambda cls, init: init(cls, 2, 4, norm_type=norm_type), lambda cls, init: init(cls, 2, 4, 3, 1, None, None, 2, norm_type)):
        a,b = ConvLayer.__new__(ConvLayer),ConvLayer.__new__(ConvLayer)
        torch.manual_seed(0); make(a, ConvLayer.__init__)
        torch.manual_seed(0); make(b, ConvLayer.__init__.__wrapped__)
        test_eq(str(a), str(b))
        for (k,p),(l,q) in zip(a.state_dict().items(), b.state_dict().items()): assert k == l and torch.equal(p, q)
    test_eq(inspect.signature(ConvLayer.__init__), inspect.signature(ConvLayer.__init__.__wrapped__))

def test_fastai_knows_it_as_a_norm():
    "No weight decay on it, trainable in a frozen body, frozen by `BnFreeze`"
    for l in (RunningBatchNorm(4), RunningBatchNorm2d(4)):
        test_eq(len(norm_bias_params(nn.Sequential(nn.Conv2d(1, 4, 3), l), with_bias=False)), 2)
    learn = image_learner()
    convert_norm(learn.model, 'running', verbose=False)
    learn.freeze()
    test_eq([p.requires_grad for p in learn.model[0].parameters()], [False, True, True])
    m = nn.Sequential(RunningBatchNorm2d(4))
    m[0].requires_grad_(False)
    set_bn_eval(m)
    assert not m[0].training
