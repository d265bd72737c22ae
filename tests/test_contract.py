"""One execution, no compile, no transfer and no fallback in each steady batch, for every case of the coverage table

    make test ARGS='tests/test_contract.py -k optimizer'"""
from functools import lru_cache, partial
import pytest, torch
import fastai_xla.transfer as transfer
from fastcore.all import L, groupby
from fastai.callback.core import Callback
from fastai.callback.tracker import SaveModelCallback
from fastai.optimizer import OptimWrapper
import fastai_xla.coverage as coverage
from fastai_xla.coverage import _run, measure
from fastai_xla.cases import Case, groups, images, language_model, resnet

more = [Case('save with optimizer', lambda: images().add_cbs(SaveModelCallback(every_epoch=True, with_opt=True))),
    Case('zero lr', images, lambda l: l.fit(2, 0.)), Case('unfrozen', images, lambda l: (l.freeze(), l.fit(1), l.unfreeze(), l.fit(2))),
    Case('torch Adagrad', lambda: images(opt_func=partial(OptimWrapper, opt=torch.optim.Adagrad)), lambda l: l.fit(2)),
    Case('decay everywhere', lambda: images(wd=.1, wd_bn_bias=True)), Case('no metrics', lambda: images(metrics=None))]

fewer = {'language model': partial(language_model, 10), 'resnet18': partial(resnet, 16)}   # texts, pixels than in the table

def by_kind(cases):
    "Cases of one metric each: those on one kind of learner together"
    kinds = groupby(cases, lambda c: (c.make.func, c.make.args[:1], c.make.keywords.get('y')))
    def together(cs): return partial(cs[0].make, metrics=[m for c in cs for m in L(c.make.keywords['metrics'])])
    return [Case(f'{len(cs)} with {cs[0].name}', together(cs)) for cs in kinds.values()]

listed = [(g, c) for g,cs in (groups | dict(more=more)).items() for c in cs]
# the same learner and run as another case, or a part of one that keeps the contract with more
contained = dict(schedule=['fit_one_cycle'], optimizer=['Adam'], loss=['cross_entropy', 'mse', 'bce'], model=['multi-label'],
    augmentation=['points and image', 'mask and image', 'flip', 'dihedral', 'zoom', 'warp', 'contrast'],
    callback=['progress', 'activation_stats'])
cases = [(g, c) for g,cs in (groups | dict(metric=by_kind(groups['metric']), more=more)).items() for c in cs
         if c.name not in contained.get(g, ())]

@pytest.fixture(autouse=True)
def no_looks(monkeypatch):
    "The progress bar reads once a second: on a busy machine one would fall into a steady batch"
    monkeypatch.setattr(transfer, 'look_every', float('inf'))

@lru_cache
def fitted(make): return _run(Case('fitted', make, lambda l: l.fit(1)), True)

@pytest.mark.parametrize('case', [c for _,c in cases], ids=[f'{g}-{c.name}' for g,c in cases])
def test_keeps(case, monkeypatch):
    "Calls of inference are all measured on one fitted learner"
    monkeypatch.setattr(case, 'make', fewer.get(case.name, case.make))
    if case.group == 'inference': monkeypatch.setattr(coverage, '_run', lambda case, xla: fitted(case.make))
    row = measure(case, cpu=False)
    assert row['kept'] or case.remark, row

def test_few_exceptions():
    "An exception has to be impossible, not hard, and names its reason"
    assert len(listed) >= 100 and len([c for _,c in listed if c.remark]) <= 3
    assert {(g, n) for g,ns in contained.items() for n in ns} <= {(g, c.name) for g,c in listed}

class Planted(Callback):
    "What the contract forbids, done once per batch in training"
    run_valid = False
    def __init__(self, kind): self.kind = kind
    def after_loss(self):
        if self.kind == 'item': self.learn.seen = self.loss.item()
        if self.kind == 'fallback': self.learn.seen = torch.i0(self.loss.detach())
        if self.kind == 'recompile': self.learn.seen = self.pred.detach()[:, :1].repeat(1, self.train_iter+1)

@pytest.mark.parametrize('kind,field', [('item', 'to_host'), ('fallback', 'fallbacks'), ('recompile', 'compiles')])
def test_probe_sees(kind, field):
    row = measure(Case(kind, lambda: images().add_cbs(Planted(kind)), lambda l: l.fit(1)), cpu=False)
    assert not row['kept'] and row[field], row
