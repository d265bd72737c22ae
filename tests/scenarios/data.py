"Data: datasets that change, transforms that count, draw or read"
import random
from fastai.callback.all import *
from fastai.vision.augment import *
from .base import *
from .losses import within
from .callbacks import Train

def xy(n=56, size=4, ch=1):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, ch, size, size, generator=g),torch.randint(4, (n,), generator=g)

class Items:
    "A dataset with a state"
    def __init__(self, n, start=0, f=None):
        x,y = xy()
        self.x,self.y,self.scale,self.f = x[start:start+n],y[start:start+n],1.,f or (lambda self, x: x*self.scale)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.f(self, self.x[i]),self.y[i]

def of_items(train=None, valid=None, **kwargs):
    return DataLoaders.from_dsets(train or Items(40), valid or Items(16, 40), **dict(bs=8, num_workers=0, shuffle=False) | kwargs)

@scenario
def dataset_counts():
    def f(self, x):
        self.scale += .01
        return x*self.scale
    return learner(data=of_items(Items(40, f=f)))

@scenario
def dataset_draws_with_torch(): return learner(data=of_items(Items(40, f=lambda s, x: x+torch.rand(1))))

def tfm_dls(*tfms, size=8, ch=1, **kwargs):
    x,y = xy(size=size, ch=ch)
    items = [(TensorImage(a), b) for a,b in zip(x, y)]
    return DataLoaders.from_dsets(items[:40], items[40:], bs=8, num_workers=0, shuffle=False, after_batch=list(tfms), **kwargs)
def tiny_convnet(ch=1): return nn.Sequential(nn.Conv2d(ch, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
def conv(*tfms, ch=1, **kwargs): return learner(tiny_convnet(ch), data=tfm_dls(*tfms, ch=ch), **kwargs)

class Scale(Transform):
    def __init__(self, by=1.): self.by = by
    def encodes(self, x:TensorImage): return x*self.by

@scenario
def batch_transform_that_counts():
    class Counts(Transform):
        n = 0
        def encodes(self, x:TensorImage):
            self.n += 1
            return x/self.n
    return conv(Counts())

@scenario
def batch_transform_draws_on_the_host():
    class Draws(Transform):
        def encodes(self, x:TensorImage): return x*random.random()
    return conv(Draws())

@scenario
def batch_transform_by_the_epoch():
    class Of(Transform):
        def encodes(self, x:TensorImage): return x*[1., .5, .25, 2.][self.learn.epoch]
    t = Of()
    l = conv(t)
    t.learn = l
    return l

@scenario
def module_in_a_batch_transform():
    class Of(Transform):
        def __init__(self): self.m = nn.Hardtanh()
        def encodes(self, x:TensorImage): return self.m(x)
    return conv(Of(), cbs=within(lambda l, i: setattr(l.dls.train.after_batch.fs[0].m, 'max_val', .1*i)))

@scenario
def normalize_with_other_statistics():
    n = Normalize.from_stats([.1], [.5], cuda=False)
    def change(l, i): l.dls.train.after_batch.fs[0].mean = l.dls.train.after_batch.fs[0].mean*0+.1*i
    return conv(n, cbs=within(change))

@scenario
def mixup(): return learner(loss_func=CrossEntropyLossFlat(), cbs=MixUp(.4))
class SiameseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc,self.head = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU()),nn.Linear(16, 2)
    def forward(self, a, b): return self.head(torch.cat([self.enc(a), self.enc(b)], dim=1))

class SiameseImage(fastuple): pass
class SiamesePair(Transform):
    def __init__(self, x, y): self.x,self.y = x,y
    def encodes(self, i):
        j = random.randrange(len(self.x))
        return SiameseImage(TensorImage(self.x[i]), TensorImage(self.x[j]), TensorCategory(int(self.y[i] == self.y[j])))

@scenario
def siamese():
    x,y = xy()
    tls = TfmdLists(range(56), SiamesePair(x, y), splits=[list(range(40)), list(range(40, 56))])
    d = tls.dataloaders(bs=8, num_workers=0, shuffle=False, shuffle_train=False)
    d.train._n_inp = d.valid._n_inp = 2
    return learner(SiameseNet(), data=d)
