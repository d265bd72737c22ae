"RunningBatchNorm in training: on XLA, saved, compiled, with checkpointing, in other dtypes and layouts"
import io
from copy import deepcopy
import own_process, pytest, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.optim import SAM
from fastai_xla.transfer import *
from common import *
from probe import *
from norms import *
from on_both import compare, fits, plain

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
    test_eq(RunningBatchNorm1d(3).step_key(), ('always',))

def test_average_of_all_batches():
    "`torch.optim.swa_utils.update_bn` asks a norm layer to forget, and then to weigh all batches alike"
    m = nn.Sequential(RunningBatchNorm2d(3))
    xs = [torch.randn(8, 3, 4, 4)*(i+1) for i in range(5)]
    m(xs[0]+100)
    torch.optim.swa_utils.update_bn(xs, m)
    test_eq(m[0].momentum, .1)
    close(m[0].running_var, torch.cat(xs).double().var((0,2,3), correction=0))

def test_sam_counts_a_step_once():
    "Its second forward pass is no other step for layers that skip their statistics, replayed or not"
    def make():
        net = nn.Sequential(nn.Flatten(), RunningBatchNorm1d(64, update_every=2, warmup=0), nn.Linear(64, 4))
        return Learner(image_dls(n=5*8, n_valid=2*8, bs=8, shuffle=False), net, loss_func=CrossEntropyLossFlat(), cbs=SAM())
    def story(learn):
        fits(learn)
        return [learn.model[1].seen, learn.model[1].step]
    compare(make, story)

@pytest.mark.parametrize('update_every', [1, 2])
def test_within_a_module_of_the_users(update_every):
    "Replayed: what it applies in the backward pass is the package's"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm,self.lin = RunningBatchNorm1d(64, update_every=update_every, warmup=0),nn.Linear(64, 4)
        def forward(self, x): return self.lin(self.norm(x.flatten(1)))
    def make(): return Learner(image_dls(n=8*8, n_valid=2*8, bs=8, shuffle=False), Net(), loss_func=CrossEntropyLossFlat())
    learn = compare(make, fits)
    assert not plain(learn)

class Teacher(Callback):
    "A copy of the model that goes on counting, in an attribute or out of sight"
    def __init__(self, hidden): self.hidden = hidden
    def before_fit(self):
        if 'teach' in vars(self): return
        copy = deepcopy(self.model)
        if not self.hidden: self.copy = copy
        self.teach,self.parts = (lambda x: copy(x)) if self.hidden else (lambda x: self.copy(x)),copy.state_dict
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad + (self.pred-self.teach(self.x).detach()).pow(2).mean()

@pytest.mark.parametrize('hidden', [False, True])
def test_a_copy_with_counters_of_its_own(hidden, recorded):
    "Not in the model, which is asked what its layers are about to do"
    def make():
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), RunningBatchNorm1d(8, update_every=3, warmup=10), nn.Linear(8, 4))
        dls = image_dls(n=9*8, n_valid=2*8, bs=8, shuffle=False)
        return Learner(dls, net, loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=Teacher(hidden))
    def story(learn):
        fits(learn)
        return learn.teacher.parts()
    compare(make, story, replays=['auto'])
