"Subclasses of fastai's classes that have other code here: what a user overrides is at work, and what it reads is there"
import random
import pytest, torch
from fastcore.test import test_close
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.runtime import device

device()   # before any backward pass on the CPU

def pictures(tfms=(), masks=False, n=48, bs=8):
    g = torch.Generator().manual_seed(1)
    x,y = torch.rand(n, 3, 8, 8, generator=g),torch.randint(2 if masks else 3, (n, 8, 8) if masks else (n,), generator=g)
    kinds = [lambda i: TensorImage(x[i])],[lambda i: (TensorMask if masks else TensorCategory)(y[i])]
    dsets = Datasets(L(range(n)), kinds, splits=[list(range(n-2*bs)), list(range(n-2*bs, n))])
    return dsets.dataloaders(bs=bs, num_workers=0, shuffle=False, after_batch=list(tfms))

def left(on_xla, make):
    "Losses, values and weights after a fit"
    set_seed(0)
    learn = make()
    if on_xla: learn.to_xla()
    set_seed(7)
    with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
    res = [*learn.recorder.losses, *L(learn.recorder.values).map(L).concat()]
    return [float(o) for o in (*res, *learn.validate())],learn

def as_on_the_cpu(make):
    (cpu,_),(xla,_) = left(False, make),left(True, make)
    test_close(xla, cpu, 1e-4)

def classifier(tfms=(), cbs=None):
    return Learner(pictures(tfms), nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), loss_func=CrossEntropyLossFlat(), cbs=cbs)

# --- transforms that toss a coin or draw a place

class Blackens(RandomErasing):
    "In a part of the batches"
    def encodes(self, x:TensorImage):
        x = x.clone()
        x[...,:4,:4] = 0.
        return x
class Colours(RandomErasing):
    "By what it draws where fastai has tossed"
    def before_call(self, b, split_idx):
        super().before_call(b, split_idx)
        self.k = random.random() if self.do else 1.
    def encodes(self, x:TensorImage): return x*self.k
class Cuts(RandomResizedCropGPU):
    def encodes(self, x:TensorImage):
        (t,l),(h,w) = self.tl,self.cp_size
        return F.interpolate(x[...,t:t+h,l:l+w], self.size, mode='nearest')
class CutsToo(RandomResizedCropGPU):
    def _encode(self, x, mode): return Cuts.encodes(self, x) if isinstance(x, TensorImage) else x

transforms = dict(blackens=lambda: Blackens(p=.5), colours=lambda: Colours(p=.5),
                  cuts=lambda: Cuts(8, min_scale=.5), cuts_too=lambda: CutsToo(8, min_scale=.5))

@pytest.mark.parametrize('name', transforms)
def test_a_transform_with_code_of_its_own(name): as_on_the_cpu(lambda: classifier([transforms[name]()]))

def test_a_subclass_without_code_of_its_own_is_one_program():
    class Named(RandomErasing): order = 70
    report = left(True, lambda: classifier([Named(p=.5, max_count=2)]))[1].xla_report()
    assert not report.plain and report.per_batch()['executions'] == 1

# --- where a picture is cut out

class Corner(CutMix):
    def rand_bbox(self, W, H, lam): return 0, 0, W//2, H//3
class CornerOfTensors(CutMix):
    def rand_bbox(self, W, H, lam): return [torch.tensor([o]).to(lam.device) for o in (0, 0, W//2, H//3)]

@pytest.mark.parametrize('cb', [Corner, CornerOfTensors])
def test_a_box_of_the_users(cb): as_on_the_cpu(lambda: classifier(cbs=cb()))

# --- metrics of overlaps

class IoU(Dice):
    @property
    def value(self): return self.inter/(self.union-self.inter) if self.union > 0 else None
class MeanIoU(DiceMulti):
    @property
    def value(self): return np.nanmean([self.inter[c]/(self.union[c]-self.inter[c]) if self.union[c] > 0 else np.nan for c in self.inter])
class HalfDice(Dice):
    @property
    def value(self): return super().value/2
class Growing(Dice):
    "What it has come to after each batch"
    def accumulate(self, learn):
        super().accumulate(learn)
        self.seen = [*getattr(self, 'seen', []), self.inter]
    @property
    def value(self): return sum(self.seen)/len(self.seen)/1000

# those that are counted after the step do not share a learner with those that are within it
@pytest.mark.parametrize('metrics', [(IoU, MeanIoU, HalfDice), (Growing,), (Dice, JaccardCoeff, DiceMulti, JaccardCoeffMulti)],
                         ids=['of_values', 'of_batches', 'of_fastai'])
def test_values_of_the_users(metrics):
    loss = CrossEntropyLossFlat(axis=1)
    as_on_the_cpu(lambda: Learner(pictures(masks=True), nn.Conv2d(3, 2, 3, padding=1), loss_func=loss, metrics=[m() for m in metrics]))

# --- what a learning rate finder has seen

class Finds(LRFinder):
    def after_batch(self):
        super().after_batch()
        self.seen = [*getattr(self, 'seen', []), float(self.best_loss)]

def test_a_finder_is_asked_for_its_best_loss(tmp_path):
    def seen(on_xla):
        set_seed(0)
        learn = Learner(pictures(), nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), loss_func=CrossEntropyLossFlat(), path=tmp_path)
        if on_xla: learn.to_xla()
        cb = Finds(num_it=7, stop_div=False)
        with learn.no_bar(), learn.no_logging(): learn.fit(2, cbs=cb)
        return [*cb.seen, float(cb.best_loss)]
    test_close(seen(True), seen(False), 1e-4)
