"What packages on top of fastai do, in a few lines each: the same on XLA as on the CPU"
import gc, sys, threading
from contextlib import nullcontext
import pytest, torch
from torch import nn
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.aot.take import _state_of
from fastai_xla.capture import alive
from fastai_xla.runtime import device
from fastai_xla.seeds import manual_seed
from fastai_xla.transfer import fetch
from common import *

class Series(TensorBase):
    "A tensor whose `data` is a property of its own, which cannot be set"
    @property
    def data(self): return self.as_subclass(torch.Tensor)

def series_dls(n=6*8, bs=8, channels=3, steps=16):
    g = torch.Generator().manual_seed(0)
    x,y = torch.randn(n, channels, steps, generator=g),torch.randint(3, (n,), generator=g)
    x[x > 2.5] = torch.nan
    tls = [[lambda i: Series(x[i])], [lambda i: TensorCategory(y[i])]]
    dsets = Datasets(L(range(n)), tls, splits=[list(range(n-2*bs)), list(range(n-2*bs, n))])
    return dsets.dataloaders(bs=bs, num_workers=0)

class Fills(nn.Module):
    "A model that writes into its batch where it finds no numbers there"
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    def forward(self, x):
        missing = torch.isnan(x)
        if missing.any(): x[missing] = 0
        return self.net(x)

def fitted(make, on_xla, n=2):
    "Losses, weights and optimizer state after a fit"
    set_seed(0)
    manual_seed(0)
    learn = make()
    if on_xla: learn.to_xla()
    with learn.no_logging(), learn.no_bar(): learn.fit(n, 1e-2)
    state = [v for s in learn.opt.state_dict()['state'] for _,v in sorted(s.items())]
    tensors = [*learn.model.state_dict().values(), *(v for v in state if isinstance(v, torch.Tensor))]
    return (learn,torch.stack(learn.recorder.losses),[fetch(t.detach()) for t in tensors],
            [v for v in state if not isinstance(v, torch.Tensor)])

def agree(make, tol=1e-4):
    "A fit on XLA comes to what one on the CPU does; the learner that was there"
    _,losses,tensors,numbers = fitted(make, False)
    learn,*there = fitted(make, True)
    test_close(fetch(there[0]), losses, eps=tol)
    for a,b in zip(there[1], tensors, strict=True): test_close(a, b, eps=tol)
    test_eq(there[2], numbers)
    return learn

def given_up(learn, reason):
    "Have traces been begun and given up?"
    assert any(reason in why for why in learn.xla_opt.replay.reasons.why), learn.xla_opt.replay.reasons.why

def test_batch_whose_data_cannot_be_set():
    "A trace that is given up puts back all that it has changed, the batch too"
    given_up(agree(lambda: Learner(series_dls(), Fills(), loss_func=CrossEntropyLossFlat())), 'reads a value within the step')

def test_a_recorder_that_a_package_replaces_after_the_import(monkeypatch):
    "It keeps its metrics in places of its own, as fastxtend's, and they are computed after the step"
    def before_fit(self): self.losses,self.values,self.lrs,self.iters,self.own = [],[],[],[],[]
    def after_batch(self):
        if self.training: self.losses.append(self.learn.loss.detach().clone())
        self.own.append(self.learn.loss.detach().clone())
    def nothing(self): pass
    monkeypatch.setattr(Recorder, '_train_mets', property(lambda self: self.mets_of_its_own))   # which it has not yet
    for f in (before_fit, after_batch): monkeypatch.setattr(Recorder, f.__name__, f)
    for n in ('before_train', 'before_validate', 'after_train', 'after_validate', 'before_epoch', 'after_epoch', 'after_cancel_train',
              'after_cancel_validate', 'after_fit'): monkeypatch.setattr(Recorder, n, nothing)
    agree(lambda: Learner(series_dls(), nn.Sequential(nn.Flatten(), NoNaN(), nn.Linear(48, 3)), loss_func=CrossEntropyLossFlat()))

class NoNaN(nn.Module):
    def forward(self, x): return torch.nan_to_num(x.as_subclass(torch.Tensor))

class Keeps(Callback):
    "The weights that a pruner may go back to, with the graph that `clone` gives them"
    def before_fit(self):
        for m in self.model.modules():
            if isinstance(m, nn.Linear): m.register_buffer('_init_weights', m.weight.clone())
    def after_step(self):
        for m in self.model.modules():
            if isinstance(m, nn.Linear): m.weight.data.mul_(.99)

def test_a_buffer_with_a_graph_that_nobody_reads_does_not_stop_the_replay():
    g = torch.Generator().manual_seed(0)
    x,y = torch.randn(58, 4, generator=g),torch.randn(58, 3, generator=g)
    def make():
        dls = DataLoaders.from_dsets(list(zip(x[:48], y[:48])), list(zip(x[48:], y[48:])), bs=8, num_workers=0)
        return Learner(dls, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), loss_func=MSELossFlat(), cbs=Keeps())
    learn = agree(make)
    assert not learn.xla_opt.replay.fit.plain and learn.xla_opt.replay.by_log.fit.counts[True]['replayed'] > 8

class Tells(TfmdDL):
    "A `DataLoader` that tells which items its last batch is made of"
    def create_batch(self, b):
        b = list(b)
        self.told = torch.tensor([i for *_,i in b])
        return super().create_batch([(x, y) for x,y,_ in b])

class Weighs(Callback):
    "A weight for each item in the loss"
    def before_batch(self): self.learn.loss_func.w = self.learn.dl.told.to(self.x.device).float()/10

class Weighted(nn.Module):
    def forward(self, pred, y): return (F.cross_entropy(pred, y, reduction='none')*self.w).mean()

def test_what_a_dataloader_tells_of_its_batch_is_of_the_batch_at_hand():
    g = torch.Generator().manual_seed(0)
    items = [(torch.randn(4, generator=g), torch.randint(3, (), generator=g), i) for i in range(64)]
    def make():
        dls = DataLoaders(*(Tells(items, bs=8, shuffle=shuffle, num_workers=0) for shuffle in (True, False)))
        return Learner(dls, nn.Linear(4, 3), loss_func=Weighted(), cbs=Weighs())
    agree(make)

def test_bitwise_operators_with_a_number():
    x = {dtype: torch.tensor([0, 1, 1]).to(dtype) for dtype in (torch.bool, torch.uint8, torch.int64)}
    for t in x.values():
        for f in (lambda t: t ^ 1, lambda t: 1 & t, lambda t: t | True, lambda t: torch.bitwise_xor(t, 3)):
            with count_xla() as c: here,there = fetch(f(t.to(device()))),f(t)
            assert not c.fallbacks
            assert here.dtype == there.dtype and torch.equal(here, there)

def test_diagonal_of_the_first_dimensions():
    x = torch.arange(5*5*3.).view(5, 5, 3)
    for f in (lambda x: x.diagonal(), lambda x: x[:,:2].diagonal().T, lambda x: x.diagonal(1, 0, 1), lambda x: torch.einsum('iij->ij', x)):
        with count_xla() as c: assert torch.equal(fetch(f(x.to(device()))), f(x))
        assert not c.fallbacks

class Counts(torch.optim.SGD):
    "An optimizer that counts its steps in a tensor beside the states of its parameters"
    def step(self, closure=None):
        if 'k' not in self.state: self.state['k'] = torch.tensor([0])
        super().step(closure)
        self.state['k'] += 1

def test_optimizer_with_a_tensor_of_its_own_in_its_state():
    losses = []
    for on_xla in (False, True):
        set_seed(0)
        learn = image_learner(image_dls(n=4*8, n_valid=8, bs=8), opt_func=partial(OptimWrapper, opt=Counts))
        if on_xla: learn.to_xla()
        with learn.no_logging(), learn.no_bar(): learn.fit(2, 1e-2)
        losses.append(fetch(torch.stack(learn.recorder.losses)))
        test_eq(learn.opt.opt.state['k'].item(), 2*4)
    test_close(losses[1], losses[0], eps=1e-4)
    check_training(learn)
    test_eq(_state_of(learn), {})   # what programs take is the parameters' state
    learn.detach_xla()
    with learn.no_logging(), learn.no_bar(): learn.fit(1, 1e-2)
    test_eq(learn.opt.opt.state['k'].item(), 3*4)

class Looks(nn.Module):
    "A model that reads a value, so that its steps are not replayed"
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
    def forward(self, x): return self.net(x if x.max().item() < 99 else x/x.max())

def test_metrics_of_a_last_batch_of_another_size_whose_trace_is_given_up():
    g = torch.Generator().manual_seed(0)
    x,y = torch.randn(58, 4, generator=g),torch.randn(58, 3, generator=g)
    values = []
    for on_xla in (False, True):
        set_seed(0)
        dls = DataLoaders.from_dsets(list(zip(x[:32], y[:32])), list(zip(x[32:], y[32:])), bs=8, num_workers=0)
        learn = Learner(dls, Looks(), loss_func=MSELossFlat(), metrics=mae)
        if on_xla: learn.to_xla()
        with learn.no_logging(), learn.no_bar(): learn.fit(2, 1e-2)
        values.append(torch.tensor([[float(v) for v in vs] for vs in learn.recorder.values]))
    given_up(learn, 'reads a value within the step')
    test_close(values[1], values[0], eps=1e-4)

class Inside(torch.optim.Optimizer):
    "An optimizer around another one, as SAM's of public code; the inner one's groups are its own"
    def __init__(self, params, lr=1e-3, inner=partial(torch.optim.SGD, momentum=.9)):
        super().__init__(params, dict(lr=lr))
        self.base = inner(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)
    def step(self, closure=None): self.base.step()

class Slow(Inside):
    "Lookahead: every third step the weights go half of the way from those of three steps before"
    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr, torch.optim.AdamW)
        self.n,self.slow = 0,None
    def step(self, closure=None):
        if self.slow is None: self.slow = [[p.data.clone() for p in g['params']] for g in self.param_groups]
        self.base.step()
        self.n += 1
        if self.n%3: return
        for g,slow in zip(self.param_groups, self.slow):
            for p,q in zip(g['params'], slow):
                q.add_(.5*(p.data-q))
                p.data.copy_(q)

class Signs(torch.optim.Optimizer):
    "The user's own arithmetic, with numbers in a pair"
    def __init__(self, params, lr=1e-3, betas=(.9, .99)): super().__init__(params, dict(lr=lr, betas=betas))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            a,b = g['betas']
            for p in g['params']:
                if 'avg' not in self.state[p]: self.state[p]['avg'] = torch.zeros_like(p)
                avg = self.state[p]['avg']
                p.add_(torch.tanh(100*(a*avg + (1-a)*p.grad)), alpha=-g['lr'])
                avg.mul_(b).add_(p.grad, alpha=1-b)

class Bag: pass

class Elsewhere(torch.optim.SGD):
    "Its momentum is in an object of the user's own"
    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)
        self.bag = Bag()
        self.bag.avg = [torch.zeros_like(p) for g in self.param_groups for p in g['params']]
    @torch.no_grad()
    def step(self, closure=None):
        for p,avg in zip(self.param_groups[0]['params'], self.bag.avg):
            avg.mul_(.9).add_(p.grad)
            p.sub_(self.param_groups[0]['lr']*avg)

@pytest.mark.parametrize('opt', [Inside, Slow, Signs, Elsewhere])
def test_optimizers_of_the_users_own(opt):
    "The CPU's losses and weights, replayed, also with state that nobody can find"
    g = torch.Generator().manual_seed(0)
    x,y = torch.randn(96, 6, generator=g),torch.randint(3, (96,), generator=g)
    results = []
    for on_xla in (False, True):
        set_seed(0)
        dls = DataLoaders.from_dsets(list(zip(x[:80], y[:80])), list(zip(x[80:], y[80:])), bs=8, num_workers=0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=partial(OptimWrapper, opt=opt))
        if on_xla: learn.to_xla()
        with learn.no_logging(), learn.no_bar(): learn.fit_one_cycle(3, 1e-2)
        results.append(fetch([torch.stack(list(learn.recorder.losses)), *learn.model.parameters()]))
    for a,b in zip(*results): test_close(a, b, eps=1e-4)
    assert sum(learn.xla_report().plain.values()) <= 2, learn.xla_report()

def test_scan_where_garbage_is_collected(monkeypatch, capfd):
    "Tensors that only C++ holds do not die while the scan looks at them"
    def forgotten():
        learn = image_learner().remove_cb(ProgressCallback).to_xla()
        with learn.no_logging(): learn.fit(1)
    gc.collect()
    gc.disable()
    try:
        forgotten()
        looked,is_xla = [],alive.is_xla
        def collecting(t):
            if not looked: gc.collect()
            looked.append(t)
            return is_xla(t)
        monkeypatch.setattr(alive, 'is_xla', collecting)
        alive.live_tensors([])
    finally: gc.enable()
    assert len(looked) > 10 and 'live PyObject references' not in capfd.readouterr().err

def critic(): return nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(.2), nn.Linear(8, 1))

def both(make):
    "What `make` gives on the CPU and on XLA"
    res = []
    for xla in (False, True):
        set_seed(0, reproducible=True)
        res.append([torch.as_tensor(t).detach().cpu() for t in make(xla)])
    return zip(*res)

@pytest.mark.parametrize('frozen', [False, True])
def test_critic_in_the_loss(frozen):
    "A second network, which the step only leaves gradients with: nobody zeroes them"
    def make(xla):
        G,D = nn.Linear(8, 2),critic().requires_grad_(not frozen)
        items = list(zip(torch.randn(64, 8), torch.randn(64, 1)))
        learn = Learner(DataLoaders.from_dsets(items, items, bs=16, num_workers=0), G, loss_func=lambda p, y: F.mse_loss(D(p), y))
        learn.remove_cb(ProgressCallback)
        if xla: D.to(learn.to_xla().dls.device)
        with learn.no_logging(): learn.fit(3, 1e-2)
        return [*learn.recorder.losses, *G.parameters(), *(p.grad for p in D.parameters() if not frozen)]
    for a,b in both(make): assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)

def test_gan_of_two_learners():
    def make(xla):
        G,D = nn.Linear(8, 2),critic()
        z,real = torch.randn(64, 8),torch.randn(64, 2)*.3+1
        dls = lambda a: DataLoaders.from_dsets(list(zip(a, z)), list(zip(a, z)), bs=16, num_workers=0)
        gen = Learner(dls(z), G, loss_func=lambda p, y: F.softplus(-D(p)).mean())
        dis = Learner(dls(real), D, loss_func=lambda p, y: F.softplus(-p).mean() + F.softplus(D(G(y).detach())).mean())
        losses = []
        if xla: gen.to_xla(), dis.to_xla()
        for learn in (dis, gen)*3:
            learn.remove_cb(ProgressCallback)
            with learn.no_logging(): learn.fit(1, 1e-2)
            losses += [float(l) for l in learn.recorder.losses]
        return [*losses, *G.parameters(), *D.parameters()]
    for a,b in both(make): assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)

def scans(n=20):
    "What threads that build tuples run into while tensors are looked up"
    errors,over,junk = [],threading.Event(),[[i] for i in range(200_000)]
    def build():
        while not over.is_set():
            try: tuple(torch.zeros(1) if i%50 == 0 else i for i in range(200))
            except SystemError as e: errors.append(e)
    threads = [threading.Thread(target=build) for _ in range(2)]
    for t in threads: t.start()
    for _ in range(n): alive.all_tensors()
    over.set()
    for t in threads: t.join()
    return errors

def test_threads_build_tuples_while_tensors_are_looked_up(monkeypatch):
    "A thread that builds a tuple must be the only one to hold it, and a list of all objects does"
    was = sys.getswitchinterval()
    assert not scans() and sys.getswitchinterval() == was
    monkeypatch.setattr(alive, '_alone', nullcontext)
    assert any(scans() for _ in range(5))
