"What shows only where a fit has many batches"
import pytest
from fastai.vision.all import *
from fastai.callback.training import ShortEpochCallback
from fastai_xla.all import *
from common import *

def fitted(xla, dls, n=2, **kwargs):
    set_seed(0)
    learn = Learner(dls, nn.Sequential(Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4)), CrossEntropyLossFlat(), **kwargs)
    if xla: learn.to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(n, 1e-2)
    return learn

@pytest.mark.parametrize('n', (3, 5, 8))
@pytest.mark.parametrize('norm', (False, True))
def test_gradients_that_accumulate_over_several_batches(n, norm):
    def dls(): return image_dls(n=22*4, bs=4, shuffle=False, after_batch=[Normalize.from_stats([.5], [.5])] if norm else None)
    cpu,xla = (fitted(o, dls(), opt_func=SGD, cbs=GradientAccumulation(4*n)) for o in (False, True))
    test_close(tensor(xla.recorder.losses), tensor(cpu.recorder.losses), 1e-5)
    for a,b in zip(xla.model.parameters(), cpu.model.parameters()): test_close(a.cpu(), b, 1e-5)
    report = xla.xla_report()
    assert report.per_batch()['executions'] == 1 and not report.plain and not report.beside

@pytest.mark.parametrize('what,executions', [(dict(cbs=TerminateOnNaNCallback()), 1), (dict(cbs=ShortEpochCallback(.9)), 2),
                                             (dict(metrics=RocAuc()), 1)], ids=['nan', 'short', 'roc'])
def test_nothing_gathers_over_an_epoch(what, executions):
    "Neither the sums of metrics nor counts wait for the end of the epoch, to be compiled as one program"
    learn = fitted(True, image_dls(n=40*4, n_valid=40*4, bs=4), **what)
    report = learn.xla_report()
    assert report.per_batch()['executions'] == executions and report.per_batch()['compiles'] == 0
    assert all(where.startswith(('training', 'validation')) for where in report.compiled['where'])
