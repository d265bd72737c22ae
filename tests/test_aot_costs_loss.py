"""What cross entropy and bfloat16 cost on a TPU, as its compiler estimates it

    make test ARGS='tests/test_aot_costs_loss.py'

What needs the compiler is skipped where it is not installed (`pip install 'fastai_xla[aot]'`)."""
import re
import own_process, pytest, torch
import torch.nn.functional as F
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.aot.compile import cannot_compile
from fastai_xla.aot.take import take_programs
from fastai_xla.lowerings import loss
from fastai_xla.lowerings.all import without_lowerings
from common import *
from aot_learners import shared_cache

needs_compiler = pytest.mark.skipif(bool(cannot_compile()), reason=f'no compiler for TPUs: {cannot_compile()}')

def learner(x, y, model, **kwargs):
    "Of items that are no images"
    set_seed(0)
    bs = len(x)//2
    dsets = Datasets(L(range(2*bs)), [[x.__getitem__], [y.__getitem__]], splits=[list(range(bs)), list(range(bs, 2*bs))])
    learn = Learner(dsets.dataloaders(bs=bs, num_workers=0), model, **dict(loss_func=CrossEntropyLossFlat()) | kwargs)
    learn.remove_cb(ProgressCallback)
    return learn

def language_model(vocab=2000, bias=False):
    t = torch.randint(vocab, (64, 33))
    return learner(t[:,:-1], t[:,1:], nn.Sequential(nn.Embedding(vocab, 64), nn.LayerNorm(64), nn.Linear(64, vocab, bias=bias)))

def step(learn):
    r = learn.to_xla().tpu_report(valid=False, verbose=False)
    assert r and not r.error
    return r.step

# Cross entropy

def of_loss(p):
    "Cycles of the lines of the loss"
    df = p.program.by('line')
    return df[df.index.str.contains(r'lowerings/(?:loss|wrong)\.py|fastai/losses\.py')].cycles.sum()

@needs_compiler
@pytest.mark.parametrize('half', [False, True])
def test_cross_entropy_of_a_large_vocabulary_goes_through_the_logits_less_often(half):
    make = lambda: language_model().to_bf16() if half else language_model()
    now = step(make())
    with without_lowerings('cross_entropy'): before = step(make())
    assert 0 < of_loss(now) < .5*of_loss(before)
    assert now.program.cycles < .7*before.program.cycles and now.memory < before.memory

def test_few_logits_are_left_alone(monkeypatch):
    "Taken over, they are dearer"
    def text(): return take_programs(image_learner(image_dls(size=32, bs=64)).to_xla(), valid=False)[0].text
    now = text()
    with without_lowerings('cross_entropy'): assert text() == now
    monkeypatch.setattr(loss, '_few', 0)
    assert text() != now   # the control

@pytest.mark.parametrize('change', [dict(label_smoothing=.4), dict(ignore_index=2), dict(weight=torch.tensor([1.,.5,.5,2.])), {}])
def test_changed_arguments_are_noticed(change, monkeypatch):
    "Between the fits and within one, as a step on the CPU; the last changes nothing"
    monkeypatch.setattr(loss, '_few', 0)
    losses = {}
    for on in ('cpu', 'xla'):
        f = partial(F.cross_entropy, label_smoothing=.1)
        set_seed(0)
        learn = image_learner(loss_func=lambda p, y: f(p, y), cbs=Callback(after_batch=lambda self: self.train_iter == 6 and change_it()))
        learn.remove_cb(ProgressCallback)
        def change_it():
            f.keywords.update({k: v.to(learn.xb[0].device) if isinstance(v, torch.Tensor) else v for k,v in change.items()})
        if on == 'xla': learn.to_xla()
        else: learn.dls.cpu()
        with learn.no_logging(): learn.fit(2, 1e-2)
        losses[on] = L(learn.recorder.values).map(lambda o: list(o)[:2])
    for a,b in zip(*losses.values(), strict=True): test_close(a, b, 1e-4)

# bfloat16

def wide_convnet():
    "Weights that are larger than activations"
    net = nn.Sequential(nn.Conv2d(1, 256, 3, stride=2), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(),
                        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 4))
    return learner(torch.randn(32, 1, 9, 9), torch.randint(4, (32,)), net)

def casts_to(p, *shape):
    s = 'x'.join(map(str, shape))
    return len(re.findall(rf'convert .*tensor<{s}xf32>\) -> tensor<{s}xbf16>', p.text))

def test_no_weight_is_cast_for_bfloat16():
    p = take_programs(wide_convnet().to_bf16().to_xla(), valid=False)[0]
    with without_lowerings('autocast'): before = take_programs(wide_convnet().to_bf16().to_xla(), valid=False)[0]
    assert (casts_to(p, 256, 256, 3, 3), casts_to(before, 256, 256, 3, 3)) == (0, 2)
    assert casts_to(p, 4, 256) == 0 < casts_to(before, 4, 256)

def test_products_of_several_passes_keep_the_cast(tmp_path):
    "Of bfloat16 one is enough"
    code = """import sys; sys.path.insert(0, 'tests')
from test_aot_costs_loss import *
learn = wide_convnet().to_bf16().to_xla(matmul_precision='high')
print('casts', casts_to(take_programs(learn, valid=False)[0], 256, 256, 3, 3))"""
    res = own_process.run(['-c', code], tmp_path)
    assert 'casts 2' in res.stdout, res.stderr[-2000:]

@needs_compiler
def test_bfloat16_is_no_slower_where_weights_are_large():
    full,now = step(wide_convnet()),step(wide_convnet().to_bf16())
    with without_lowerings('autocast'): before = step(wide_convnet().to_bf16())
    assert now.program.cycles < 1.02*full.program.cycles < before.program.cycles
