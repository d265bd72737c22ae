"Small data and small learners; nothing of fastai_xla"
import torch
from torch import nn
from fastai.vision.all import *

def image_dls(n=8*16, n_valid=4*16, bs=16, size=8, classes=4, seed=0, shuffle=True, after_batch=None):
    "Noise with labels: for counting, not for learning"
    g = torch.Generator().manual_seed(seed)
    x = TensorImageBW(torch.randn(n+n_valid, 1, size, size, generator=g))
    y = TensorCategory(torch.randint(classes, (n+n_valid,), generator=g))
    dsets = Datasets(L(range(n+n_valid)), [[x.__getitem__], [y.__getitem__]], splits=[list(range(n)), list(range(n, n+n_valid))])
    dls = dsets.dataloaders(bs=bs, num_workers=0, shuffle=shuffle, after_batch=after_batch)
    dls.c = classes
    return dls

def convnet(classes=4):
    return nn.Sequential(nn.Sequential(ConvLayer(1, 8, stride=2)),
                         nn.Sequential(ConvLayer(8, 8, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(8, classes)))

def params_of(model): return [list(m.parameters()) for m in model]

def image_learner(dls=None, **kwargs):
    kwargs = dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy, splitter=params_of) | kwargs
    return Learner(dls or image_dls(), convnet(), **kwargs)
