"What the tests share: small data, small learners, and a probe of what each batch costs"
import torch
from torch import nn
from fastai.vision.all import *
from fastai_xla.runtime import xla_counts

def image_dls(n=8*16, n_valid=4*16, bs=16, size=8, classes=4, seed=0, shuffle=True, after_batch=None):
    "Noise with labels: for counting, not for learning"
    g = torch.Generator().manual_seed(seed)
    def items(n): return [(TensorImageBW(torch.randn(1, size, size, generator=g)), TensorCategory(torch.randint(classes, (), generator=g))) for _ in range(n)]
    dls = DataLoaders.from_dsets(items(n), items(n_valid), bs=bs, num_workers=0, shuffle=shuffle, **({'after_batch': after_batch} if after_batch else {}))
    dls.c = classes
    return dls

def convnet(classes=4):
    return nn.Sequential(nn.Sequential(ConvLayer(1, 8, stride=2)), nn.Sequential(ConvLayer(8, 8, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(8, classes)))

def params_of(model): return [list(m.parameters()) for m in model]

def image_learner(dls=None, **kwargs):
    kwargs = dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy, splitter=params_of) | kwargs
    return Learner(dls or image_dls(), convnet(), **kwargs)

class Probe(Callback):
    "After everything else, note what has come up since the end of the batch before"
    order = 2000
    def before_fit(self):
        if not hasattr(self, 'gather_preds'): self.rows = []
    def before_train(self): self.last = xla_counts()
    def before_validate(self): self.last = xla_counts()
    def after_batch(self):
        now = xla_counts()
        self.rows.append((self.training, self.iter, now-self.last))
        self.last = now
    def steady(self, training):
        "Costs of the batches of the last fit that the contract is about: from the third in training, from the second of each validation"
        rows = [c for t,i,c in self.rows if t == training and (t or i > 0)]
        return rows[2:] if training else rows

def breaches(costs):
    "What of `costs`, one `XLACounts` per batch, breaks the contract"
    return [f'{i}: {c}' for i,c in enumerate(costs) if c.executions != 1 or c.compiles or c.to_host - c.looks or c.fallbacks]
