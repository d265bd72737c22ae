"""What cross entropy and bfloat16 cost on a TPU, as its compiler estimates it

    make test ARGS='tests/test_aot_costs_loss.py'

What needs the compiler is skipped where it is not installed (`pip install 'fastai_xla[aot]'`)."""
import pytest, torch
import torch.nn.functional as F
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.aot.compile import cannot_compile
from fastai_xla.aot.take import take_programs
from fastai_xla.lowerings import loss
from fastai_xla.lowerings.all import without_lowerings
from common import *

needs_compiler = pytest.mark.skipif(bool(cannot_compile()), reason=f'no compiler for TPUs: {cannot_compile()}')

@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch): monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))

def learner(x, y, model, **kwargs):
    "Of items that are no images"
    set_seed(0)
    bs = len(x)//2
    dsets = Datasets(L(range(2*bs)), [[x.__getitem__], [y.__getitem__]], splits=[list(range(bs)), list(range(bs, 2*bs))])
    learn = Learner(dsets.dataloaders(bs=bs, num_workers=0), model, **dict(loss_func=CrossEntropyLossFlat()) | kwargs)
    learn.remove_cb(ProgressCallback)
    return learn

def language_model(vocab=8000, bias=False):
    t = torch.randint(vocab, (32, 33))
    return learner(t[:,:-1], t[:,1:], nn.Sequential(nn.Embedding(vocab, 64), nn.LayerNorm(64), nn.Linear(64, vocab, bias=bias)))

def step(learn):
    r = learn.to_xla().tpu_report(valid=False, verbose=False)
    assert r and not r.error
    return r.step

# Cross entropy

def of_loss(p):
    "Cycles of the lines of the loss"
    df = p.program.by('line')
    return df[df.index.str.contains(r'lowerings/(?:loss|wrong)\.py|mixed\.py')].cycles.sum()

@needs_compiler
@pytest.mark.parametrize('half,share', [(False, .65), (True, .5)])
def test_cross_entropy_of_a_large_vocabulary_goes_through_the_logits_less_often(half, share):
    make = lambda: language_model().to_bf16() if half else language_model()
    now = step(make())
    with without_lowerings('cross_entropy'): before = step(make())
    assert 0 < of_loss(now) < share*of_loss(before)
    assert now.program.cycles < .7*before.program.cycles and now.memory < before.memory

@needs_compiler
def test_few_logits_cost_what_they_did():
    "The lowering leaves them alone: taken over, they are dearer"
    costs = {}
    for few in (None, 0):
        with pytest.MonkeyPatch.context() as m:
            if few is not None: m.setattr(loss, '_few', few)
            costs[few] = step(image_learner(image_dls(size=32, bs=64))).program.cycles
    with without_lowerings('cross_entropy'): assert costs[None] == step(image_learner(image_dls(size=32, bs=64))).program.cycles < costs[0]

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
