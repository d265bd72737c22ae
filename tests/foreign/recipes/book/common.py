"What the recipes of all chapters share: `start` is called in their setup"
import sys
from pathlib import Path
import torch

def small_batches(bs):
    "Dataloaders make batches of at most `bs` items"
    from fastai.data.load import DataLoader
    from fastai.text.data import LMDataLoader
    init,most = DataLoader.__init__,bs
    def __init__(self, dataset=None, bs=None, *args, **kwargs):
        if bs and not isinstance(self, LMDataLoader): bs = min(bs, most)
        init(self, dataset, bs, *args, **kwargs)
    DataLoader.__init__ = __init__

def count(t): return torch.ones_like(t, dtype=torch.float32).as_subclass(torch.Tensor).cumsum(0)

class EvenlySpread(torch.Tensor):
    "A tensor that gives the same numbers on each device, where others draw"
    def uniform_(self, a=0., b=1.): return (count(self)*.37 - .17)%1*(b-a) + a

def fix_draws():
    "Batch transforms take evenly spread numbers in place of random ones"
    import fastai.vision.augment as augment
    draw_mask = augment._draw_mask
    def _draw_mask(x, *args, **kwargs): return draw_mask(x.as_subclass(EvenlySpread), *args, **kwargs)
    def mask_tensor(x, p=.5, neutral=0., batch=False):
        if p == 1.: return x
        keep = count(x)*3%10 < p*10
        return (x.as_subclass(torch.Tensor)-neutral)*keep + neutral
    augment._draw_mask,augment.mask_tensor = _draw_mask,mask_tensor

def small_texts():
    "An AWD-LSTM that compiles in seconds"
    from fastai.text.models import awdlstm
    for config in (awdlstm.awd_lstm_lm_config, awdlstm.awd_lstm_clas_config): config.update(emb_sz=16, n_hid=24, n_layers=2)

def small_resnets():
    "One block in each of their four stages, an eighth as wide"
    from torchvision.models import resnet
    make,layer = resnet._resnet,resnet.ResNet._make_layer
    resnet._resnet = lambda block, layers, *args, **kwargs: make(block, [1]*4, *args, **kwargs)
    resnet.ResNet._make_layer = lambda self, block, planes, *args, **kwargs: layer(self, block, planes//8, *args, **kwargs)

def sort_files():
    "Folders are listed by name, else words that are equally frequent stand in a vocabulary in the order of the disk"
    import os
    walk = os.walk
    def _walk(*args, **kwargs):
        for path,folders,files in walk(*args, **kwargs):
            folders.sort()
            yield path,folders,sorted(files)
    os.walk = _walk

def start(bs=8, workers=0):
    from fastai.torch_core import defaults
    sys.path.insert(0, str(Path(__file__).parent/'modules'))
    defaults.cpus = workers
    small_batches(bs)
    fix_draws()
    small_resnets()
    small_texts()
    sort_files()
