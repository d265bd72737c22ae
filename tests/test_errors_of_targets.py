"Targets out of range end a fit on XLA where they do on the CPU, and only there"
import re
import pytest, torch
from fastai.vision.all import *
from fastai_xla.all import *

def mask_learner(codes, n_out=4, tfms=None, loss_func=None, model=noop, **kwargs):
    "Masks of such codes"
    g = torch.Generator().manual_seed(0)
    x,y = torch.randn(24, 3, 8, 8, generator=g),torch.tensor(codes)[torch.randint(len(codes), (24, 8, 8), generator=g)]
    items = [(TensorImage(a), TensorMask(b)) for a,b in zip(x, y)]
    dls = DataLoaders.from_dsets(items, items, bs=8, num_workers=0, after_batch=tfms)
    return Learner(dls, model(nn.Conv2d(3, n_out, 1)), loss_func=loss_func or CrossEntropyLossFlat(axis=1), **kwargs)

class Own(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.m = m
    def forward(self, x): return self.m(x)
class MapsVoid(Callback):
    def before_batch(self): self.learn.yb = (torch.where(self.y == 255, 0, self.y),)
class Watches(Callback):
    def after_batch(self): self.seen = self.pred.shape
void = [0, 1, 2, 3, 255]

refused = dict(void=dict(codes=void), binary=dict(codes=[0, 255], n_out=2), negative=dict(codes=[-1, 0]),
    own_model=dict(codes=void, model=Own), own_callback=dict(codes=void, cbs=Watches),
    augmented=dict(codes=void, tfms=[*aug_transforms(), IntToFloatTensor()]),
    function=dict(codes=void, loss_func=partial(F.cross_entropy, ignore_index=3)))
modes = dict(replayed=dict(), retraced=dict(replay=False), several=dict(steps_per_execution=2))

# whether targets are looked at does not depend on how steps are run
@pytest.mark.parametrize('kind,mode', [*((kind, 'replayed') for kind in refused),
                                       ('void', 'retraced'), ('void', 'several'), ('own_model', 'several')])
def test_targets_out_of_range(kind, mode):
    "What raises on the CPU does so here, at the end of the first batch"
    learn = mask_learner(**refused[kind])
    with learn.no_bar(), learn.no_logging():
        with pytest.raises(IndexError, match='Target .* is out of bounds') as cpu: learn.fit(1)
        with pytest.raises(IndexError, match=re.escape(str(cpu.value).split('\n')[-1])) as xla: learn.to_xla(**modes[mode]).fit(1)
    assert (learn.epoch, learn.iter) == (0, 0) and all(o in str(xla.value) for o in ('compiled program', 'ignore_index=', 'n_out'))

def test_targets_out_of_range_in_validation():
    learn = mask_learner([0, 1, 2, 3])
    learn.dls.loaders[1] = mask_learner(void).dls.valid
    learn.to_xla()
    with learn.no_bar(), learn.no_logging(), pytest.raises(IndexError, match='Target 255 is out of bounds'): learn.fit(1)
    assert not learn.training and learn.recorder.losses

@pytest.mark.parametrize('mode', modes)
def test_one_target_out_of_range_in_a_later_batch(mode):
    "As a class of which a split has one item"
    y = torch.randint(0, 3, (48,))
    y[33] = 3
    dls = DataLoaders.from_dsets(list(zip(torch.randn(48, 4), y)), bs=8, shuffle=False, num_workers=0, device='cpu')
    learn = Learner(dls, nn.Linear(4, 3), loss_func=CrossEntropyLossFlat())
    with learn.no_bar(), learn.no_logging():
        with pytest.raises(IndexError, match='Target 3 is out of bounds'): learn.fit(1)
        assert learn.iter == 4
        with pytest.raises(IndexError, match='Target 3 is out of bounds'): learn.to_xla(**modes[mode]).fit(1)
    assert learn.iter == 4

accepted = dict(ignored=dict(codes=void, loss_func=CrossEntropyLossFlat(axis=1, ignore_index=255)),
    own_callback=dict(codes=void, cbs=MapsVoid), divided=dict(codes=[0, 255], n_out=2, tfms=IntToFloatTensor(div_mask=255)),
    by_default=dict(codes=[-100, 0, 3]),
    own_transform=dict(codes=void, tfms=Transform(lambda x: x.clamp(max=3) if isinstance(x, TensorMask) else x)),
    dice=dict(codes=void, loss_func=DiceLoss()))
@pytest.mark.parametrize('learner', accepted.values(), ids=accepted)
def test_targets_that_only_look_out_of_range(learner):
    "Where the CPU trains, so does XLA"
    learn = mask_learner(**learner)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        learn.to_xla().fit(1)

@pytest.mark.parametrize('codes,mode', [*((void, mode) for mode in modes), ([0, 1, 2, 3], 'replayed')])
def test_targets_that_nobody_sees_on_the_host(codes, mode):
    "Behind a transform of the user's: the loss is NaN, where it left them out and looked like any other"
    own = Transform(lambda x: x+0 if isinstance(x, TensorMask) else x)
    learn = mask_learner(codes, tfms=own, cbs=TerminateOnNaNCallback()).to_xla(**modes[mode])
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert all(o.isnan() for o in learn.recorder.losses) == (255 in codes)

def test_a_look_at_targets_costs_the_device_nothing(monkeypatch):
    def counts():
        learn = mask_learner([0, 1, 2, 3]).to_xla()
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
            with count_xla() as c: learn.fit(1)
        return c.compiles,c.executions,c.to_host,c.to_device
    counts()   # numbers that the process sends once
    looked = counts()
    monkeypatch.setattr('fastai_xla.opt_callback.watch_targets', lambda learn: None)
    assert looked == counts() and looked[:2] == (0, 6)
