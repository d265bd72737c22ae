"What is replaced in a process before its first cell: downloads, pretrained weights, and, for the run on XLA, the making of learners"
import functools, hashlib, sys
from pathlib import Path
import torch
from torch import nn
import torch.nn.functional as F

def replace_everywhere(old, new):
    "Whatever fastai module holds `old` under a name, of its own or imported, holds `new` from now on"
    for name,module in list(sys.modules.items()):
        if not name.startswith(('fastai.', 'torchvision.', 'timm.', 'fastbook')) or module is None: continue
        for k,v in list(vars(module).items()):
            if v is old: setattr(module, k, new)

# Data

def no_downloads(folder, makers):
    "`untar_data` makes a stand-in of the data set in `folder`, by the maker that goes by its name in `URLs`"
    import fastai.data.external as ext
    names = {getattr(ext.URLs, n): n for n in dir(ext.URLs) if n.isupper() or n[:2] in ('ML', 'WT')}
    def untar_data(url, *args, **kwargs):
        name = names.get(url, url)
        if name not in makers: raise FileNotFoundError(f"There is no stand-in for the data set {name}")
        path = Path(folder)/name.lower()
        if not path.exists():
            path.mkdir(parents=True)
            makers[name](path)
        return path
    replace_everywhere(ext.untar_data, untar_data)

# Pretrained weights

class Seeded(dict):
    "Stands for the weights of whatever model they are loaded into"
    def __missing__(self, k): return self

def _seeded(name, t):
    if not t.is_floating_point(): return torch.zeros_like(t)
    if t.dim() < 2: return torch.zeros_like(t) if name.endswith(('bias', 'running_mean')) else torch.ones_like(t)
    g = torch.Generator().manual_seed(int(hashlib.md5(name.encode()).hexdigest()[:8], 16))
    return torch.randn(t.shape, generator=g) * (2/t[0].numel())**.5

def seeded_weights(model): return {k: _seeded(k, v) for k,v in model.state_dict().items()}

def no_pretrained():
    "Weights that would be downloaded are random, from a seed, of the shapes that the model has"
    import torchvision.models._api as api
    load = nn.Module.load_state_dict
    def load_state_dict(self, state_dict, *args, **kwargs):
        return load(self, seeded_weights(self) if isinstance(state_dict, Seeded) else state_dict, *args, **kwargs)
    nn.Module.load_state_dict = load_state_dict
    weights = lambda *args, **kwargs: Seeded()
    replace_everywhere(torch.hub.load_state_dict_from_url, weights)
    torch.hub.load_state_dict_from_url = weights
    api.WeightsEnum.get_state_dict = weights
    try: import timm.models._builder as builder
    except ImportError: return
    builder.load_pretrained = lambda model, *args, **kwargs: model.load_state_dict(Seeded())

# Dropout

def no_dropout():
    "Dropout lets everything through, so that two devices can be compared"
    import fastai.text.models.awdlstm as awd
    for name in ('dropout', 'dropout1d', 'dropout2d', 'dropout3d', 'alpha_dropout', 'feature_alpha_dropout'):
        setattr(F, name, lambda input, *args, **kwargs: input*1)   # a new tensor, as dropout gives: AWD_LSTM puts it in a parameter's place
    replace_everywhere(awd.dropout_mask, lambda x, sz, p: x.new_ones(*sz))

# Learners

class Making:
    "What is done to each learner once its outermost constructor or factory is done, as a user would write `.to_xla()` there"
    def __init__(self, act): self.act,self.depth,self.unmoved = act,0,[]

    def moved(self, learn):
        from fastai.learner import Learner
        if self.depth or not isinstance(learn, Learner): return
        if getattr(learn, 'dls', None) is None or getattr(learn, 'model', None) is None:
            self.unmoved.append('a learner without dataloaders or model')
        else: self.act(learn)

    def factory(self, f):
        @functools.wraps(f)
        def inner(*args, **kwargs):
            self.depth += 1
            try: res = f(*args, **kwargs)
            finally: self.depth -= 1
            self.moved(res)
            return res
        return inner

    def constructor(self, cls):
        "Wrap `cls.__init__`, if it has one of its own"
        init = vars(cls).get('__init__')
        if init is None or hasattr(init, 'is_making'): return
        @functools.wraps(init)
        def __init__(obj, *args, **kwargs):
            self.depth += 1
            try: init(obj, *args, **kwargs)
            finally: self.depth -= 1
            self.moved(obj)
        __init__.is_making = True
        cls.__init__ = __init__

def _below(cls): return [cls] + [s for c in cls.__subclasses__() for s in _below(c)]

factories = ('vision_learner', 'cnn_learner', 'unet_learner', 'language_model_learner', 'text_classifier_learner',
             'tabular_learner', 'collab_learner', 'load_learner')

def nudge(learn, size=1e-7):
    "Change weights by a relative `size`: what comes of it is how far rounding can go"
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in learn.model.parameters(): p *= 1 + size*torch.randint(-1, 2, p.shape, generator=g).to(p.device)

def learners(act):
    "Have `act` done to each learner that is made from now on"
    import fastai.learner
    Learner,making = fastai.learner.Learner,Making(act)
    found = {f for m in list(sys.modules.values()) if getattr(m, '__name__', '').startswith('fastai.') for n in factories
             if (f := vars(m).get(n))}
    for f in found: replace_everywhere(f, making.factory(f))
    for cls in _below(Learner):
        making.constructor(cls)
        for n,m in list(vars(cls).items()):   # factories such as `GANLearner.wgan`
            if isinstance(m, classmethod) and n != '__init_subclass__': setattr(cls, n, classmethod(making.factory(m.__func__)))
    Learner.__init_subclass__ = classmethod(lambda cls, **kwargs: making.constructor(cls))
    return making
