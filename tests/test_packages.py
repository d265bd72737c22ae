"What packages on top of fastai do, in a few lines each: the same on XLA as on the CPU"
import torch
from torch import nn
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.runtime import device
from fastai_xla.seeds import manual_seed
from fastai_xla.transfer import fetch

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
