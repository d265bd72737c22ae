"What is drawn on the host is an input of the step: pictures mixed, cropped, erased and turned by the batch cost one execution"
import random
import pytest
from fastai.callback.all import *
from common import *
from fastai_xla.all import *
from fastai_xla.seeds import manual_seed
from fastai_xla.transfer import fetch
from probe import Probe, breaches
from scenarios.data import siamese

def dls(*tfms): return image_dls(n=8*8, n_valid=4*8, bs=8, size=16, after_batch=list(tfms))
def learner(*tfms, **kwargs): return image_learner(dls(*tfms), **kwargs)
def cross_entropy(pred, targ): return -(targ*F.log_softmax(pred, dim=1)).sum(1).mean()

class OneHot(Transform):
    def encodes(self, y:TensorCategory): return TensorMultiCategory(F.one_hot(y.as_subclass(torch.Tensor), 4).float())

cases = dict(
    mixup=lambda: learner(cbs=MixUp()), cutmix=lambda: learner(cbs=CutMix()),
    mixup_of_probabilities=lambda: learner(OneHot(), loss_func=cross_entropy, metrics=None, cbs=MixUp()),
    crop=lambda: learner(*aug_transforms(min_scale=.6, size=12)),
    mixup_of_augmented=lambda: learner(*aug_transforms(size=16), cbs=MixUp()),
    batch_dihedral=lambda: learner(*aug_transforms(batch=True, flip_vert=True, size=12)),
    batch_colours=lambda: learner(Brightness(batch=True), Contrast(batch=True)),
    erasing=lambda: learner(RandomErasing(p=.5, max_count=3)), siamese=siamese)

def trained(name, n=2, **to):
    set_seed(0)
    manual_seed(0)
    learn,probe = cases[name]().to_xla(**to),Probe()
    with learn.no_logging(), learn.no_bar(): learn.fit(n, 1e-2, cbs=probe)
    return learn,probe

def left(learn):
    return fetch([*learn.recorder.losses, *(t.detach() for t in learn.model.state_dict().values())]),torch.tensor(learn.recorder.values)

@pytest.mark.parametrize('name', cases)
def test_one_execution_for_each_step_and_the_draws_of_retraced_ones(name):
    learn,probe = trained(name, n=4 if name == 'siamese' else 2)   # of few batches to validate with, most are audited
    next_one = random.random()
    for training in (True, False):
        costs = probe.steady(training)
        assert costs and not breaches(costs), breaches(costs)
        assert learn.xla_report().per_batch('training' if training else 'validation')['executions'] == 1
    report = learn.xla_report()
    assert not report.plain and not report.beside
    if name in ('mixup_of_augmented', 'batch_colours', 'siamese'): return
    plain,_ = trained(name, replay=False)
    assert random.random() == next_one   # as many numbers
    (ts,values),(plain_ts,plain_values) = left(learn),left(plain)
    for p,q in zip([*ts, values], [*plain_ts, plain_values], strict=True): torch.testing.assert_close(p, q, rtol=0, atol=0)

def test_several_steps_as_one():
    learn,_ = trained('mixup', n=4, steps_per_execution=4)
    assert learn.xla_report().per_batch()['executions'] == 1/4 and not learn.xla_report().beside
    plain,_ = trained('mixup', n=4, replay=False)
    for p,q in zip(left(learn)[0], left(plain)[0]): torch.testing.assert_close(p, q, rtol=0, atol=1e-6)

def test_what_is_drawn_from_may_change():
    "In the middle of an epoch"
    class Change(Callback):
        order = MixUp.order-1
        def before_train(self): self.at = 3
        def after_batch(self):
            if self.training and self.iter == self.at: self.learn.mix_up.distrib = torch.distributions.Beta(*torch.tensor([99., 99.]))
    def run(**to):
        set_seed(0)
        manual_seed(0)
        learn = learner(cbs=[MixUp(), Change()]).to_xla(**to)
        with learn.no_logging(), learn.no_bar(): learn.fit(2, 1e-2)
        return learn
    a,b = run(),run(replay=False)
    for p,q in zip(a.recorder.losses, b.recorder.losses): torch.testing.assert_close(p, q, rtol=0, atol=0)
    assert fetch(a.mix_up.lam).max() < .7 and not a.xla_report().plain

def test_a_crop_that_is_not_recorded_says_what_to_type(recorded):
    items = L((TensorImage(torch.rand(3, 16, 16)), TensorPoint(torch.rand(1, 16, 16))) for _ in range(8))
    dls = DataLoaders(*(TfmdDL(items, bs=4, after_batch=[RandomResizedCropGPU(12)]) for _ in range(2)))
    for dl in dls: dl._n_inp = 1
    learn = Learner(dls, nn.Conv2d(3, 1, 1), loss_func=lambda pred, targ: (pred.mean() - targ.as_subclass(torch.Tensor).mean())**2).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    told = ' '.join(map(str, learn.xla_report().beside))
    assert 'TensorPoint' in told and 'item_tfms=RandomResizedCrop(size)' in told
