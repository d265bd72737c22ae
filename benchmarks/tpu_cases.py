"Learners to be compiled for a TPU that the coverage table does not have: each lowering with its gradients, and models at real sizes"
import sys
from functools import partial
from pathlib import Path

import torch, torchvision
import torch.nn.functional as F
from fastai.vision.all import *
from fastai.text.all import *
from fastai.tabular.all import *
from torch.utils.checkpoint import checkpoint
from fastai_xla.all import *
from fastai_xla.cases import Case

sys.path.insert(0, str(Path(__file__).resolve().parent))
from peers.models import Transformer, make_model

class Held(Module):
    "The mean of `f` of its own parameters, times the input: a training step runs `f` and its gradients"
    def __init__(self, f, *shapes):
        self.f,self.scale = f,nn.Parameter(torch.ones(1))
        self.ws = nn.ParameterList(nn.Parameter(torch.rand(s)*.5+.1) for s in shapes)
    def forward(self, x):
        res = self.f(*self.ws)
        return x[:,:1]*self.scale*sum(o.float().mean() for o in (res if isinstance(res, tuple) else [res]))

def _dls(x, y, bs):
    "One batch to train on and one to validate on, the same items again"
    n = len(x)
    dsets = Datasets(L(range(2*bs)), [[lambda i: x[i%n]], [lambda i: y[i%n]]], splits=[list(range(bs)), list(range(bs, 2*bs))])
    return dsets.dataloaders(bs=bs, num_workers=0, shuffle=False)

def held(f, *shapes):
    return Learner(_dls(torch.randn(4, 10), torch.randn(4, 1), 4), Held(f, *shapes), loss_func=MSELossFlat(), opt_func=SGD)

def recurrent(kind, **kwargs):
    m = getattr(nn, kind)(12, 16, 2, batch_first=True, **kwargs)
    class Net(Module):
        def __init__(self): self.rnn = m
        def forward(self, x): return self.rnn(x)[0].mean((1,2))[:,None]
    return Learner(_dls(torch.randn(4, 20, 12), torch.randn(4, 1), 4), Net(), loss_func=MSELossFlat(), opt_func=SGD)

def norms(kind, shape):
    return held(nn.Sequential(kind, Lambda(torch.square)), shape)

_image,_grid = (2,3,16,16),(2,12,12,2)
_square = (4,6,6)
def _well(a): return a + 6*torch.eye(6, device=a.device)
_ops = dict(
    grid_sample=(F.grid_sample, _image, _grid), grid_nearest=(partial(F.grid_sample, mode='nearest'), _image, _grid),
    grid_bicubic=(partial(F.grid_sample, mode='bicubic', padding_mode='reflection'), _image, _grid),
    grid_3d=(F.grid_sample, (2,3,8,8,8), (2,6,6,6,3)),
    solve=(lambda a, b: torch.linalg.solve(_well(a), b), _square, (4,6,2)), det=(lambda a: torch.linalg.det(_well(a)), _square),
    slogdet=(lambda a: torch.linalg.slogdet(_well(a))[1], _square), inverse=(lambda a: torch.inverse(_well(a)), _square),
    checkpoint=(lambda w: checkpoint(lambda o: (o@o).tanh(), w, use_reentrant=False), (16,16)),
    glu=(F.glu, (4,16)), huber_loss=(F.huber_loss, (4,16), (4,16)), weight_norm=(lambda v, g: torch._weight_norm(v, g), (8,16), (8,1)),
    vdot=(torch.vdot, (16,), (16,)), logaddexp=(torch.logaddexp, (4,16), (4,16)),
    histc=(lambda a: a*torch.histc(a.detach(), 8).sum(), (4,16)),
    avg_pool2d=(partial(F.avg_pool2d, kernel_size=3, stride=2, padding=1), _image),
    avg_pool3d=(partial(F.avg_pool3d, kernel_size=2), (2,3,8,8,8)),
    adaptive_avg_pool2d=(partial(F.adaptive_avg_pool2d, output_size=5), _image),
    adaptive_avg_pool3d=(partial(F.adaptive_avg_pool3d, output_size=3), (2,3,8,8,8)), elu=(F.elu, (4,16)), selu=(F.selu, (4,16)),
    amax=(lambda a: (a.amax(1), a.amin(1)), (4,16)), cumsum=(partial(torch.cumsum, dim=1), (4,16)), norm=(torch.norm, (4,16)),
    norm_dim=(partial(torch.norm, dim=1), (4,16)), std=(partial(torch.std, dim=1), (4,16)),
    kl_div=(lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction='batchmean'), (4,16), (4,16)),
    svd=(lambda a: torch.svd(a)[1], (8,4)), diagonal=(lambda a: torch.diagonal(a, dim1=1, dim2=2)**2, _square),
    einsum=(partial(torch.einsum, 'bij,bjk->bik'), _square, _square), abs_complex=(lambda a: torch.view_as_complex(a).abs(), (4,16,2)),
    large_vocabulary=(lambda a, w: F.cross_entropy(a@w, torch.arange(64, device=a.device)), (64,32), (32,4000)))

def _resized(mode, dims, **kwargs):
    shape = (2,3,*[8]*dims)
    return partial(held, partial(F.interpolate, scale_factor=2.5, mode=mode, **kwargs), shape)

lowering = [Case(n, partial(held, *a)) for n,a in _ops.items()] + [
    *(Case(f'resize {m}', _resized(m, d)) for m,d in (('nearest', 1), ('nearest', 2), ('nearest', 3), ('nearest-exact', 2), ('linear', 1),
        ('bilinear', 2), ('bicubic', 2), ('trilinear', 3))),
    Case('resize antialias', _resized('bilinear', 2, antialias=True)),
    *(Case(k, partial(recurrent, k)) for k in ('LSTM', 'GRU', 'RNN')),
    Case('LSTM both ways', partial(recurrent, 'LSTM', bidirectional=True)),
    *(Case(f'{k.__name__}', partial(norms, k(3), (4,3,*[6]*d))) for k,d in ((nn.BatchNorm1d, 1), (nn.BatchNorm2d, 2), (nn.BatchNorm3d, 3),
        (RunningBatchNorm, 2)))]

def digits(model, **kwargs):
    x,y = torch.rand(64, 1, 28, 28),TensorCategory(torch.arange(64)%10)
    return Learner(_dls(TensorImageBW(x), y, 64), model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, **kwargs)

def digits_model():
    return nn.Sequential(ConvLayer(1, 32), ConvLayer(32, 64, stride=2), ConvLayer(64, 128, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(),
        nn.Linear(128, 10))

def running(): return convert_norm(digits_model(), 'running', verbose=False, update_every=2)

tutorial = [Case('digits', partial(digits, digits_model)), Case('RunningBatchNorm', partial(digits, running)),
    Case('energy model', partial(digits, digits_model, cbs=[ContrastiveDivergence(20, step_size=1., noise=.03, clip=(-1, 1))]))]

def images(arch, bs, size, n_out=10, bf16=False):
    dls = _dls(TensorImage(torch.rand(1, 3, size, size)), TensorCategory(torch.zeros(1).long()), bs)
    learn = Learner(dls, arch(num_classes=n_out), loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=partial(SGD, mom=.9))
    return learn.to_bf16() if bf16 else learn

def xresnet(num_classes): return xresnet50(n_out=num_classes)

def segments(bs, size):
    dls = _dls(TensorImage(torch.rand(1, 3, size, size)), TensorMask(torch.zeros(1, size, size).long()), bs)
    dls.c = 2
    return unet_learner(dls, resnet18, pretrained=False, n_out=2, loss_func=CrossEntropyLossFlat(axis=1))

def words(bs, length, vocab, **kwargs):
    x = torch.randint(2, vocab, (1, length+1))
    dls = _dls(x[:,:-1], x[:,1:], bs)
    return Learner(dls, Transformer(vocab, length, **kwargs), loss_func=CrossEntropyLossFlat(), metrics=accuracy)

def language(bs, bptt, vocab, **config):
    x = torch.randint(2, vocab, (1, bptt+1))
    dls = _dls(LMTensorText(x[:,:-1]), x[:,1:], bs)
    model = get_language_model(AWD_LSTM, vocab, config=awd_lstm_lm_config | config)
    return LMLearner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, splitter=awd_lstm_lm_split)

def table(bs):
    dsets = _dls(torch.randint(20, (1, 8)), torch.zeros(1).long(), bs)
    class Net(Module):
        def __init__(self): self.net = TabularModel([(20, 8)]*8, 0, 2, [200, 100])
        def forward(self, x): return self.net(x, x[:,:0].float())
    return Learner(dsets, Net(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)

resnet = dict(resnet18=torchvision.models.resnet18, resnet50=torchvision.models.resnet50)
# as `benchmarks/steps.py` has them, for which there are host times
benchmark = [Case('convnet', partial(digits, lambda: make_model('convnet'))),
    *(Case(n, partial(images, f, 8, 64)) for n,f in resnet.items()),
    Case('transformer', partial(words, 32, 64, 200)), Case('tabular', partial(table, 64)),
    Case('awd_lstm', partial(language, 16, 18, 200, emb_sz=64, n_hid=128, n_layers=2))]
real = [Case('resnet18', partial(images, resnet['resnet18'], 128, 224, 1000, True)),
    Case('awd_lstm', partial(language, 64, 72, 10000)), Case('transformer', partial(words, 16, 256, 30000, d=256, heads=8)),
    Case('resnet50', partial(images, resnet['resnet50'], 128, 224, 1000, True)),
    Case('xresnet50', partial(images, xresnet, 64, 224, 10, True)),
    Case('unet', partial(segments, 8, 224)), Case('resnet50 at 4096', partial(images, resnet['resnet50'], 4096, 224, 1000, True))]

groups = dict(lowering=lowering, tutorial=tutorial, benchmark=benchmark, real=real)
