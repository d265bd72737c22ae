"PyTorch's optimizers with the settings that notebooks for GPUs give them"
import pytest, torch
from fastai.vision.all import *

from fastai_xla.all import *
from common import image_dls, image_learner
from on_both import compare, fits, plain

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

def test_counts_of_an_optimizer_that_become_equal():
    "A step of two layers is recorded when one of them has had more steps, and audited when both have had as many"
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b,self.n = nn.Linear(64, 4),nn.Linear(64, 4),0
        def forward(self, x):
            x,n = x.flatten(1),self.n
            self.n += self.training
            return (0 if n in (10, 11) else self.a(x)) + (0 if n < 2 else self.b(x))
    def make():
        return Learner(image_dls(n=20*8, n_valid=2*8, bs=8, shuffle=False), Turns(), loss_func=CrossEntropyLossFlat(),
                       opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
    learn = compare(make, partial(fits, n=3))
    assert not any('audit' in why for why in plain(learn)), plain(learn)
