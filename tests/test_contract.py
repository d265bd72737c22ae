"One execution, no compile, no transfer and no fallback in each steady batch: a table over optimizers, schedules, losses, metrics and callbacks"
import os
os.environ['XLA_FLAGS'] = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'   # short compiles; nothing here is timed
from functools import partial
import pytest, torch
from fastai.vision.all import *
from fastai.callback.all import *
from fastai_xla.all import *
from common import *
from probe import *

def wrapped(opt, **kwargs): return partial(OptimWrapper, opt=opt, **kwargs)

optimizers = dict(SGD=SGD, SGD_mom=partial(SGD, mom=.9), SGD_l2=partial(SGD, mom=.9, wd=.1, decouple_wd=False), RMSProp=RMSProp, RMSProp_mom=partial(RMSProp, mom=.9), Adam=Adam, QHAdam=QHAdam, Lamb=Lamb, Larc=Larc, Lars=partial(Larc, clip=False),
    RAdam=RAdam, ranger=ranger, Lookahead=lambda p, lr: Lookahead(Adam(p, lr)), torch_SGD=wrapped(torch.optim.SGD, momentum=.9), torch_Adam=wrapped(torch.optim.Adam), torch_AdamW=wrapped(torch.optim.AdamW),
    torch_RMSprop=wrapped(torch.optim.RMSprop))
# graphs that an algorithm adds: RAdam once its variance is tractable, Lookahead when the slow weights move
more = dict(RAdam=1, ranger=2, Lookahead=1)

schedules = dict(fit=lambda l: l.fit(2, 1e-3), one_cycle=lambda l: l.fit_one_cycle(2, 1e-3), discriminative=lambda l: l.fit_one_cycle(2, slice(1e-5, 1e-3)), flat_cos=lambda l: l.fit_flat_cos(2, 1e-3), sgdr=lambda l: l.fit_sgdr(1, 2, 1e-3),
    lr_find=lambda l: l.lr_find(num_it=20, stop_div=False, show_plot=False), fine_tune=lambda l: l.fine_tune(2, 1e-3), frozen=lambda l: (l.freeze(), l.fit(2)), unfrozen=lambda l: (l.freeze(), l.fit(1), l.unfreeze(), l.fit(2)), zero_lr=lambda l: l.fit(2, 0.))

callbacks = dict(early_stopping=lambda: EarlyStoppingCallback(), save_model=lambda: SaveModelCallback(), save_with_opt=lambda: SaveModelCallback(every_epoch=True, with_opt=True), reduce_lr=lambda: ReduceLROnPlateau(),
    terminate_on_nan=lambda: TerminateOnNaNCallback(), csv=lambda: CSVLogger(), clip=lambda: GradientClip(.1), accumulate=lambda: GradientAccumulation(32), mixup=lambda: MixUp(), progress=lambda: ProgressCallback(),
    show_graph=lambda: [ProgressCallback(), ShowGraphCallback()])

def with_train_metrics(**kwargs):
    learn = image_learner(**kwargs)
    learn.recorder.train_metrics = True
    return learn

learners = dict(label_smoothing=partial(image_learner, loss_func=LabelSmoothingCrossEntropyFlat()), weighted_loss=partial(image_learner, loss_func=CrossEntropyLossFlat(weight=torch.tensor([1.,2.,3.,4.]))),
    metrics=partial(image_learner, metrics=[accuracy, error_rate, F1Score(average='macro'), Perplexity(), ValueMetric(lambda: 1., 'one')]), no_metrics=partial(image_learner, metrics=None), train_metrics=with_train_metrics,
    wd_everywhere=partial(image_learner, wd=.1, wd_bn_bias=True), no_train_bn=partial(image_learner, train_bn=False), normalize=lambda **kwargs: image_learner(image_dls(after_batch=[Normalize.from_stats([.1], [.9], cuda=False)]), **kwargs))

def fitted(path, run=schedules['one_cycle'], cbs=None, make=image_learner, **kwargs):
    learn = make(path=path, **kwargs).remove_cb(ProgressCallback).add_cbs(cbs).add_cb(Probe()).to_xla()
    with learn.no_logging(): run(learn)
    return learn

def check(learn, extra=0):
    train,valid = learn.probe.steady(True),learn.probe.steady(False)
    assert len(train) >= 6
    compiled = [c for c in train if c.compiles] if extra else []
    assert sum(c.compiles for c in compiled) <= extra, compiled
    found = breaches([c for c in train if c not in compiled]) + breaches(valid)
    assert not found, '\n'.join(found)

@pytest.mark.parametrize('name', optimizers)
def test_optimizer(name, tmp_path): check(fitted(tmp_path, opt_func=optimizers[name]), more.get(name, 0))

@pytest.mark.parametrize('name', schedules)
def test_schedule(name, tmp_path): check(fitted(tmp_path, schedules[name]))

@pytest.mark.parametrize('name', callbacks)
def test_callback(name, tmp_path): check(fitted(tmp_path, cbs=callbacks[name]()))

@pytest.mark.parametrize('name', learners)
def test_learner(name, tmp_path): check(fitted(tmp_path, make=learners[name]))

class Planted(Callback):
    "What the contract forbids, done once per batch in training"
    run_valid = False
    def __init__(self, kind): self.kind = kind
    def after_loss(self):
        if self.kind == 'item': self.learn.seen = self.loss.item()
        if self.kind == 'fallback': self.learn.seen = torch.linalg.solve(torch.eye(3, device=self.pred.device) + self.loss.detach(), torch.eye(3, device=self.pred.device))
        if self.kind == 'recompile': self.learn.seen = self.pred.detach()[:, :1].repeat(1, self.iter+1)

@pytest.mark.parametrize('kind,field', [('item', 'to_host'), ('fallback', 'n_fallbacks'), ('recompile', 'compiles')])
def test_probe_sees(kind, field, tmp_path):
    learn = fitted(tmp_path, cbs=Planted(kind))
    assert all(getattr(c, field) >= 1 for c in learn.probe.steady(True)[:4])
