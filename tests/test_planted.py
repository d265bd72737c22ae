"""Twelve faults of the kinds that cost months, each found by the tool that is there for it, with its name and its line

    make test ARGS='tests/test_planted.py'"""
from contextlib import nullcontext
import pytest, torch
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.lowerings.all import without_lowerings
from fastai_xla.parity.locate import locate_fault
from fastai_xla.parity.models import check_training, compare_models
from fastai_xla.parity.truth import plain, swap_op
from common import *
from planted import *

def reported(cb=None, loss=None, replay='auto'):
    "What the report of a watched fit says: cause, what, line. It is retraced, as a watched fit is not replayed"
    kwargs,size = dict(loss_func=loss()) if loss else {},9 if replay else 10   # what this process has compiled is not compiled again
    learn,told = watched(cb() if cb else None, replay=replay, dls=image_dls(size=size), **kwargs)
    causes = learn.xla_report().causes
    assert len(told) == len(causes) and all(l in repr(learn.xla_report()) for l in causes.line)
    return [(c.cause, f'{c.what}; {c.line}') for c in causes.itertuples()]

def checked(plant=noop):
    "What `check_training` says: parameter, reason"
    learn = image_learner().remove_cb(ProgressCallback)
    plant(learn)
    return [(n, r) for n,r in check_training(learn).table.reason.items()]

def located(context=nullcontext, tanh=nn.Tanh, norm=nn.LayerNorm, mode=True):
    "What `locate_fault` says: module, verdict"
    with context(): f = locate_fault(tanh_net(tanh, norm).train(mode), points, F.cross_entropy)
    assert bool(f) == (f.path is not None)
    return [(f.path, f'{f.backend} {f.phase} {f.error:.0e}: {f}')] if f else []

def compared(a, b):
    "What `compare_models` says of two models of the same weights: name, difference, and place or values"
    b.load_state_dict(a.state_dict())
    return [(n, f'{r.difference:.2e} {r["at"]}') for n,r in compare_models(a, b).table.iterrows()]

def other_tanh(backend): return partial(swap_op, 'aten.tanh_backward', backend, lambda g, y: g*(1-y*y)*1.001)
_norm = torch.ops.aten.native_layer_norm.default
def other_eps(): return swap_op(_norm, 'cpu', lambda x, shape, w, b, eps: plain(_norm)(x, shape, w, b, 1e-3))

every = [n for n,_ in convnet().named_parameters()]

# fault -> how it is planted and looked for; all that is found: its name, and what is said of it
faults = {
    'optimizer made before the move':       (partial(checked, opt_before_move),
                                             dict.fromkeys(every, ['made before the model moved', 'create_opt'])),
    'frozen by mistake':                    (partial(checked, frozen), {'1.3.weight': ['frozen', 'requires_grad']}),
    'a parameter on the CPU':               (partial(checked, on_the_cpu), {'1.3.weight': ['on cpu', 'the model on xla:0']}),
    'a NaN in one gradient':                (partial(checked, nan_gradient), {'1.3.weight': ['1 NaN of 32']}),
    'a Python float in the loss':           (partial(reported, loss=Weighted), {'number': ['1.01 became 1.02', line_of(Weighted)]}),
    'a new shape every third batch':        (partial(reported, Crop),
                                             {'shape': ['xb[0] f32[16,1,9,9] became f32[16,1,6,9]', line_of(Crop)]}),
    'a boolean index':                      (partial(reported, Index),
                                             {'fallback': ['aten::nonzero', line_of(Index)], 'shape': [line_of(Index)]}),
    'an operator without lowering':         (partial(reported, Bessel), {'fallback': ['aten::i0', line_of(Bessel)]})}
for r in ('auto', False):
    faults[f'.item() in a callback, {r}'] = (partial(reported, Item, replay=r), {'transfer': ['.item()', line_of(Item)]})
for b in ('cpu', 'xla'):
    faults[f'a tanh with a backward off by 1e-3, {b}'] = (partial(located, other_tanh(b)),
                                                          {'1': [f'{b} backward 1e-03', 'aten.tanh_backward']})
faults |= {'a tanh with a backward off by 1e-3, own': (partial(located, tanh=Tanh), {'1': ['xla backward 1e-03', line_of(WrongTanh)]}),
    'a layer norm with a wrong eps, cpu':   (partial(located, other_eps), {'4': ['cpu forward', 'aten.native_layer_norm']}),
    'a layer norm with a wrong eps, own':   (partial(located, norm=OtherEps), {'4': ['xla forward', 'OtherEps', line_of(OtherEps)]}),
    'a layer norm with a wrong eps, of two models': (lambda: compared(tanh_net(), tanh_net(norm=partial(nn.LayerNorm, eps=1e-3))),
                                                     {'4.eps': ['1e-05 | 0.001']}),
    'BatchNorm in eval':                    (partial(located, partial(without_lowerings, 'batch_norm'), norm=nn.BatchNorm1d, mode=False),
                                             {'4': ['xla backward inf', 'aten.native_batch_norm_backward', 'offset factor is 0']})}

@pytest.mark.parametrize('fault', faults)
def test_found(fault):
    look,expected = faults[fault]
    found = look()
    assert {n for n,_ in found} == expected.keys(), found
    assert all(s in text for n,text in found for s in expected[n]), found

@pytest.mark.parametrize('look', [partial(reported, replay='auto'), partial(reported, replay=False), checked, located,
                                  partial(located, norm=nn.BatchNorm1d, mode=False)],
                         ids=['report', 'report, plain', 'check', 'locate', 'locate, eval'])
def test_nothing_found(look): assert look() == []
