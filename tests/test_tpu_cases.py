"""What the TPU's compiler says of a dozen cases of the coverage table, and of all of them in benchmarks/tpu.csv

    make test ARGS='tests/test_tpu_cases.py'

`make tpu-check` compiles the rest."""
import warnings
from pathlib import Path

import pandas as pd, pytest
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.aot.compile import cannot_compile
from fastai_xla.coverage import groups
from aot_learners import shared_cache

needs_compiler = pytest.mark.skipif(bool(cannot_compile()), reason=f'no compiler for TPUs: {cannot_compile()}')
table = pd.read_csv(Path(__file__).resolve().parent.parent/'benchmarks'/'tpu.csv')
dozen = dict(model=('autoencoder', 'transformer block', 'tabular', 'collab', 'language model', 'text classifier'),
    augmentation=('aug_transforms',), optimizer=('ranger',), callback=('mixup', 'to_bf16'), loss=('dice',), metric=('roc_auc_score',))
validated = ('tabular', 'language model', 'text classifier', 'dice', 'roc_auc_score')   # others validate by a part of their training step

def report(learn, **kwargs):
    learn.remove_cbs([cb for cb in learn.cbs if type(cb) is ProgressCallback])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return learn.to_xla().tpu_report('v5e', verbose=False, **kwargs)

@needs_compiler
@pytest.mark.parametrize('group,name', [(g, n) for g,names in dozen.items() for n in names])
def test_case_compiles(group, name):
    set_seed(0)
    case = next(c for c in groups[group] if c.name == name)
    r = report(case.make(), valid=name in validated)
    assert r and [p.traced.why for p in r.programs] == ['']*(1+(name in validated)), r.error
    assert not any(p.program.wide() for p in r.programs)   # no float64
    assert r.flops > 0 and r.bound_ms > 0 and r.step.program.cycles > 1000

class Spectral(nn.Module):
    "A layer of a Fourier neural operator"
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 5, 2))
    def forward(self, x):
        z = torch.fft.rfft2(x.view(-1, 8, 8), norm='ortho')*torch.view_as_complex(self.w)
        return torch.fft.irfft2(z, s=(8, 8), norm='ortho').flatten(1)

class Reader(nn.Module):
    "Reads a line of text"
    def __init__(self):
        super().__init__()
        self.gru,self.head = nn.GRU(8, 8),nn.Linear(8, 5)
    def forward(self, x): return self.head(self.gru(x.view(-1, 8, 8).transpose(0, 1))[0]).log_softmax(-1)

def of_texts(p, t): return F.ctc_loss(p, t[:,None].expand(-1, 3), (8,)*len(t), (3,)*len(t), blank=4)

computations = dict(fft=lambda: (nn.Sequential(Spectral(), nn.Linear(64, 4)), CrossEntropyLossFlat()), ctc=lambda: (Reader(), of_texts))

@needs_compiler
@pytest.mark.parametrize('name', computations)
def test_own_computations_compile(name):
    dls = DataLoaders.from_dsets([(torch.randn(64), 0)]*32, [(torch.randn(64), 0)]*16, bs=16, num_workers=0)
    model,loss = computations[name]()
    r = report(Learner(dls, model, loss_func=loss))
    assert r and [p.traced.why for p in r.programs] == ['', ''] and not any(p.program.wide() for p in r.programs), r.error

def test_table_has_all_cases_and_what_fails_is_known():
    v5e = table[table.topology == 'v5e']
    rows = set(zip(v5e.group, v5e.case))
    missing = [(g, c.name) for g,cs in groups.items() if g != 'inference' for c in cs if (g, c.name) not in rows]
    assert not missing, missing
    assert set(zip(v5e.group[~v5e.compiles], v5e.case[~v5e.compiles])) == {('real', 'resnet50 at 4096')}   # which does not fit
    assert not v5e.float64.sum()
    assert {'v4', 'v6e'} <= set(table.topology) and table[table.topology != 'v5e'].compiles.all()

def conv(size, ni, nf, k=1): return size*size*ni*nf*k*k   # multiply-adds for an image

def bottleneck(size, ni, nf, out, stride):
    "In torchvision's, the 3x3 convolution has the stride"
    half = size//stride
    shortcut = conv(half, ni, out) if ni != out else 0
    return conv(size, ni, nf) + conv(half, nf, nf, 3) + conv(half, nf, out) + shortcut

def resnet50_macs():
    stem = conv(112, 3, 64, 7)
    stages = ((56, 64, 64, 256, 3, 1), (56, 256, 128, 512, 4, 2), (28, 512, 256, 1024, 6, 2), (14, 1024, 512, 2048, 3, 2))
    blocks = sum(bottleneck(s, ni, nf, out, stride) + (n-1)*bottleneck(s//stride, out, nf, out, 1) for s,ni,nf,out,n,stride in stages)
    return stem,stem + blocks + 2048*1000

def test_operations_of_resnet50():
    "Forward, and backward for weights and for inputs, but not for the images"
    stem,all_of = resnet50_macs()
    assert abs(all_of/4.09e9 - 1) < .01   # as it is published
    r = table.query("topology == 'v5e' and group == 'real' and case == 'resnet50'").iloc[0]
    assert r['size'] == 128 and abs(r.flops/(128*2*(3*all_of - stem)) - 1) < .03

@needs_compiler
def test_operations_of_a_bottleneck():
    from torchvision.models.resnet import Bottleneck
    x,y = torch.rand(16, 64, 28, 28),TensorCategory(torch.arange(16)%4)
    dsets = Datasets(L(range(16)), [[lambda i: x[i%8]], [y.__getitem__]], splits=[list(range(8)), list(range(8, 16))])
    down = nn.Sequential(nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256))
    body = nn.Conv2d(64, 64, 1, bias=False),Bottleneck(64, 64, downsample=down)
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(256, 4))
    r = report(Learner(dsets.dataloaders(bs=8, num_workers=0), net, loss_func=CrossEntropyLossFlat(), opt_func=SGD), valid=False)
    first = conv(28, 64, 64)
    by_hand = 8*2*(3*(first + bottleneck(28, 64, 64, 256, 1) + 256*4) - first)
    assert abs(r.flops/by_hand - 1) < .03, r.flops/by_hand
