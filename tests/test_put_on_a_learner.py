"What a callback reaches by the learner, a loss by its method, and a library by its names"
import pytest
from fastai.vision.all import *
from fastai_xla.all import *

def data():
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    items = list(zip(x, x.sum(1, keepdim=True).tanh()))
    return DataLoaders(DataLoader(items[:48], bs=4), DataLoader(items[48:], bs=8))

def learner(loss_func=None, **kwargs):
    set_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    return Learner(data(), model, loss_func=loss_func or nn.MSELoss(), **kwargs).remove_cb(ProgressCallback)

def fitted(learn, xla, cbs=None, n_epoch=2):
    if xla is not None: learn.to_xla(**xla)
    with learn.no_logging(): learn.fit(n_epoch, 1e-2, cbs=cbs)
    state = [t.float().flatten() for t in learn.model.to('cpu').state_dict().values()]
    return torch.cat([tensor(list(map(float, learn.recorder.losses))), *state, tensor(learn.recorder.values).flatten()])

class MomentumSchedule:
    "As of PointNet++: it has the model, and sets the momentum of each BatchNorm"
    def __init__(self, model): self.model,self.momentum = model,.5
    def step(self):
        self.momentum *= .5
        for m in self.model.modules():
            if isinstance(m, nn.BatchNorm1d): m.momentum = self.momentum

class Raises:
    def __init__(self, layer): self.layer = layer
    def __call__(self): self.layer.eps += .2

class StepsIt(Callback):
    def after_batch(self):
        if self.training and self.train_iter in (5, 8): self.learn.schedule.step()

class CallsIt(Callback):
    def after_batch(self):
        if self.training and self.train_iter in (5, 8): self.learn.raises()

class OfAList(Callback):
    def after_batch(self):
        if self.training and self.train_iter in (5, 8): self.learn.schedules[0].step()

def put(learn):
    learn.schedule,learn.raises = MomentumSchedule(learn.model),Raises(learn.model[1])
    learn.schedules = [learn.schedule]
    return learn

modes = dict(auto={}, several=dict(steps_per_execution=3))

@pytest.mark.parametrize('cb', (StepsIt, CallsIt, OfAList))
@pytest.mark.parametrize('mode', modes)
@pytest.mark.filterwarnings('ignore:`steps_per_execution')
def test_an_object_that_is_put_on_the_learner_changes_a_setting(cb, mode):
    want = fitted(put(learner()), None, cb())
    assert (fitted(put(learner()), modes[mode], cb()) - want).abs().max() < 1e-4
    assert (fitted(put(learner()), None) - want).abs().max() > 1e-2   # it does change the numbers

class Replaces(Callback):
    def after_batch(self):
        if self.training and self.train_iter == 5: nn.Tanh.forward = lambda self, x: torch.relu(x)

@pytest.mark.parametrize('mode', modes)
@pytest.mark.filterwarnings('ignore:`steps_per_execution')
def test_a_method_of_a_library_is_replaced_after_a_batch(mode, monkeypatch):
    before = nn.Tanh.forward
    def run(xla, cb=None):
        monkeypatch.setattr(nn.Tanh, 'forward', before)
        return fitted(learner(), xla, cb)
    want = run(None, Replaces())
    assert (run(modes[mode], Replaces()) - want).abs().max() < 1e-4
    assert (run(None) - want).abs().max() > 1e-2

class Delta(Callback):
    def after_batch(self):
        if self.training and self.train_iter == 9: self.learn.loss_func.__self__.delta = .1

@pytest.mark.parametrize('mode', modes)
def test_a_setting_of_a_loss_that_is_a_method(mode, without_audits):
    def learn(): return learner(nn.HuberLoss(delta=1.).forward)
    want = fitted(learn(), None, Delta())
    assert (fitted(learn(), modes[mode], Delta()) - want).abs().max() < 1e-4
    assert (fitted(learn(), None) - want).abs().max() > 1e-3

class ByName(Callback):
    "No metric may be computed before it has looked"
    def __init__(self, path): self.path = path
    def after_batch(self): self.seen = getattr(self.learn, self.path)

@pytest.mark.parametrize('mode', modes)
@pytest.mark.filterwarnings('ignore:`steps_per_execution')
def test_a_metric_without_a_name(mode):
    def learn(): return learner(metrics=[nn.L1Loss(), AvgMetric(nn.MSELoss())], cbs=ByName('train_iter'))
    want = fitted(learn(), None)
    assert (fitted(learn(), modes[mode]) - want).abs().max() < 1e-4
