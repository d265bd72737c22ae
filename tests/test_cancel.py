"A callback that ends a batch's events ahead of the recorder: what the recorder does not hear is not counted"
import pytest
from fastai.vision.all import *
from fastai.callback.training import ShortEpochCallback
from fastai_xla.all import *
from common import image_learner, image_dls

class StopsTraining(Callback):
    "By a function of its own"
    def __init__(self, at): self.at = at
    def stop(self): raise CancelTrainException
    def after_batch(self):
        if self.training and self.iter == self.at: self.stop()

def leave(): raise CancelEpochException

class LeavesEpoch(StopsTraining):
    "By a function of a module"
    def stop(self): leave()

class Raises(Callback):
    "What it was given"
    def __init__(self, at, exc): store_attr()
    def after_batch(self):
        if self.training and self.iter == self.at: raise self.exc

class SkipsBatch(Callback):
    "Before there is a loss: that of the first batch is fastai's zero"
    def __init__(self, at): self.at = at
    def after_pred(self):
        if self.training and self.iter == self.at: raise CancelBatchException

class HearsAll(Callback):
    "An event is none of its methods"
    def __init__(self, at): self.at = at
    def __call__(self, event_name):
        if event_name == 'after_batch' and self.training and self.iter == self.at: raise CancelTrainException

def ran(cb, xla):
    set_seed(1)
    learn = image_learner(image_dls(n=8*16, n_valid=6*16, shuffle=False), cbs=cb)
    if xla: learn.to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
    rec = learn.recorder
    return rec.iters,len(rec.losses),tensor(rec.losses),tensor([[float(o) for o in v] for v in rec.values])

@pytest.mark.parametrize('cb',
                         [partial(ShortEpochCallback, .6), partial(ShortEpochCallback, .6, short_valid=False), partial(StopsTraining, 5),
                          partial(LeavesEpoch, 5), partial(HearsAll, 5),
                          partial(Raises, 5, CancelTrainException()), partial(Raises, 5, CancelEpochException),
                          partial(SkipsBatch, 0), partial(SkipsBatch, 3)])
def test_recorder_counts_what_it_has_heard(cb):
    (iters,n,losses,values),(iters1,n1,losses1,values1) = ran(cb(), False),ran(cb(), True)
    assert (iters1,n1) == (iters,n)
    torch.testing.assert_close(losses1, losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values1, values, rtol=1e-4, atol=1e-5)
