"Batches that are not fastai's to read ahead: of torch's `DataLoader`, of a class of the user's, by a `_set_device` of the user's"
from contextlib import nullcontext
import pytest, torch
from torch.utils.data import DataLoader as TorchLoader, TensorDataset
from fastai.vision.all import *
from fastai_xla.all import *
from on_both import agree, plain, told

def tensors(n):
    g = torch.Generator().manual_seed(n)
    return torch.randn(n, 8, generator=g),torch.randint(4, (n,), generator=g)

class Turns:
    "What can only be iterated over; the order is drawn on the host"
    def __init__(self, n): self.x,self.y = tensors(n)
    def __len__(self): return len(self.x)//8
    def __iter__(self):
        for i in torch.randperm(len(self)).tolist(): yield self.x[8*i:8*i+8],self.y[8*i:8*i+8]

class OnePass(DataLoader):
    "fastai's, with an `__iter__` of its own"
    def __iter__(self):
        for i in range(len(self)): yield tuple(torch.stack(o) for o in zip(*(self.dataset[j] for j in range(8*i, 8*i+8))))

class Shifted(Learner):
    def _set_device(self, b): return super()._set_device((b[0]+self.epoch, b[1]))

def _fastais(n): return DataLoader(TensorDataset(*tensors(n)), bs=8, num_workers=0)
loaders = dict(torch=lambda n: TorchLoader(TensorDataset(*tensors(n)), batch_size=8, shuffle=True), turns=Turns,
    own_iter=lambda n: OnePass(TensorDataset(*tensors(n)), bs=8, num_workers=0), own_set_device=_fastais)

class Last3:
    "A loss that keeps the means of the last three batches, and has a schedule of its own"
    def __init__(self): self.kept,self.n = [],0
    def __call__(self, pred, targ):
        self.n += 1
        self.kept.append(pred.detach().mean())
        del self.kept[:-3]
        return F.cross_entropy(pred*(1+self.n/50), targ) + sum(self.kept)

def learner(loader, loss=Last3):
    cls = Shifted if loader == 'own_set_device' else Learner
    return cls(DataLoaders(loaders[loader](48), loaders[loader](16)), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)),
        loss_func=loss(), metrics=accuracy, opt_func=SGD)

def fit(learn):
    learn.fit(2, .1)
    validated = list(learn.validate())
    learn.fit(2, .1)
    return validated

@pytest.mark.parametrize('loader', loaders)
def test_code_of_the_users_runs_at_each_step(loader, monkeypatch):
    "Where guards alone would refuse it, for a list that changes within the step"
    def make(): return learner(loader)
    _,there = told(make, fit)
    def on_xla(**kwargs):
        learn,here = told(make, fit, True, **kwargs)
        assert there.keys() == here.keys() and not [k for k in there if not agree(there[k], here[k], 1e-4)]
        return learn
    learn = on_xla()
    if loader in ('torch', 'own_set_device'): on_xla(replay=False)
    assert all('has another argument' in why for why in plain(learn)), plain(learn)   # while the list grows
    counts = learn.xla_opt.replay.by_log.fit.counts
    assert counts[True]['retraced'] <= 3
    monkeypatch.setattr('fastai_xla.replay.Replay.log_of', lambda self: None)
    guarded = on_xla()
    assert any('changes a list' in why for why in plain(guarded)), plain(guarded)

@pytest.mark.parametrize('loss', [CrossEntropyLossFlat, Last3])
def test_a_batch_is_one_transfer(loss):
    "One more in training where code is guarded: of the hyper-parameters"
    learn = learner('torch', loss).to_xla()
    with learn.no_logging(), learn.no_bar(): learn.fit(3, .1)
    report = learn.xla_report()
    train,valid = report.per_batch('training'),report.per_batch('validation')
    assert train['to device'] <= (1 if loss is Last3 else 2) and valid['to device'] <= 1, (train, valid)
    assert train['executions'] == valid['executions'] == 1

@pytest.mark.parametrize('loader', ['torch', 'own_set_device'])
def test_several_steps_are_run_one_by_one(loader):
    def story(learn):
        told_so = pytest.warns(UserWarning, match="batches are given one at a time") if hasattr(learn, 'xla_opt') else nullcontext()
        with told_so: learn.fit(2, .1)
    make = lambda: learner(loader, CrossEntropyLossFlat)
    _,there = told(make, story)
    _,here = told(make, story, True, steps_per_execution=3)
    assert not [k for k in there if not agree(there[k], here[k], 1e-4)]
