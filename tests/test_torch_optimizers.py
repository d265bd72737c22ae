"PyTorch's optimizers with the settings that notebooks for GPUs give them"
import pytest, torch
from fastai.vision.all import *

from fastai_xla.all import *
from common import image_learner

def fitted(xla, opt, **kwargs):
    set_seed(0)
    learn = image_learner(opt_func=partial(OptimWrapper, opt=partial(opt, **kwargs))).remove_cb(ProgressCallback)
    if xla: learn.to_xla()
    with learn.no_logging(): learn.fit(2, 1e-2)
    return learn

@pytest.mark.parametrize('setting', ['fused', 'foreach'])
@pytest.mark.parametrize('opt', [partial(torch.optim.AdamW, eps=1e-3), partial(torch.optim.SGD, momentum=.9)])
def test_a_setting_for_gpus_costs_nothing(opt, setting):
    "Of parameters on XLA PyTorch's fused optimizers raise an error, and `foreach` was retraced, with tens of transfers"
    a,b = (fitted(xla, opt, **{setting: True}) for xla in (False, True))
    for p,q in zip(a.model.parameters(), b.model.parameters()): assert torch.allclose(p, q.cpu(), atol=1e-4)
    assert b.xla_report().clean and b.xla_report().per_batch('training')['to device'] < 5

def test_nadam_reads_nothing_from_the_device_after_a_load(tmp_path):
    "PyTorch's `load_state_dict` moves to the parameter's device what NAdam keeps on the host, and reads at each step"
    learn = fitted(True, torch.optim.NAdam)
    learn.path = tmp_path
    learn.save('last')
    learn.load('last')
    with learn.no_logging(): learn.fit(2, 1e-2)
    assert not learn.xla_report().per_batch('training')['to host']

class Grads(Callback):
    "Which gradients there are before the backward pass, and where the batch begins"
    def before_fit(self): self.seen = []
    def _see(self):
        if self.training: self.seen.append([p.grad is None for p in self.model.parameters()])
    def before_batch(self): self._see()
    def after_pred(self): self._see()

@pytest.mark.parametrize('opt_func', [partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=.9)), Adam])
def test_gradients_before_the_backward_pass_are_there_as_on_the_cpu(opt_func):
    "PyTorch's `zero_grad` drops them; fastai's leaves zeros, which a replayed step showed of both"
    seen = {}
    for mode in ('cpu', 'replayed', 'retraced'):
        learn = image_learner(opt_func=opt_func, cbs=Grads()).remove_cb(ProgressCallback)
        if mode != 'cpu': learn.to_xla(replay='auto' if mode == 'replayed' else False)
        with learn.no_logging(): learn.fit(2, 1e-2)
        seen[mode] = learn.grads.seen
        assert mode != 'replayed' or not learn.xla_report().plain
    assert seen['replayed'] == seen['retraced'] == seen['cpu']
