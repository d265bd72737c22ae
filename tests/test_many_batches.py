"What shows only where a fit has many batches"
import warnings
import pytest
from fastai.vision.all import *
from fastai.callback.hook import ActivationStats
from fastai.callback.training import ShortEpochCallback
from fastai_xla.all import *
from fastai_xla.transfer import fetch
from common import *

def learner(dls, **kwargs):
    set_seed(0)
    return Learner(dls, nn.Sequential(Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4)), CrossEntropyLossFlat(), **kwargs)

def fitted(xla, dls, **kwargs):
    learn = learner(dls, **kwargs)
    if xla: learn.to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
    return learn

@pytest.mark.parametrize('n,norm', [(3, True), (8, False)])
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

class Doubled(nn.Module):
    def __init__(self, m): super().__init__(); self.m = m
    def forward(self, x): return self.m(x)*2

def classifier(users):
    m = nn.Sequential(Flatten(), nn.Linear(64, 2))
    metrics = [accuracy, F1Score(), RocAucBinary(), MatthewsCorrCoef(), AccumMetric(mse, flatten=False, activation='sigmoid')]
    metrics[-1].func = lambda p, t: (p[:, 0]-t).abs().mean()
    dls = image_dls(n=6*4, n_valid=9*4-1, bs=4, shuffle=False, classes=2)
    return Learner(dls, Doubled(m) if users else m, CrossEntropyLossFlat(), metrics=metrics)

def segmenter(users):
    x,y = torch.randn(40, 3, 8, 8),torch.randint(0, 3, (40, 8, 8))
    dls = DataLoaders.from_dsets(list(zip(x[:24], y[:24])), list(zip(x[24:], y[24:])), bs=4, shuffle=False, num_workers=0)
    m = nn.Conv2d(3, 3, 3, padding=1)
    return Learner(dls, Doubled(m) if users else m, CrossEntropyLossFlat(axis=1), metrics=[DiceMulti(), JaccardCoeffMulti()])

@pytest.mark.parametrize('users,ks', [(False, (1, 3)), (True, (1,))])
@pytest.mark.parametrize('make', (classifier, segmenter))
def test_metrics_that_keep_predictions_or_counts_run_within_the_step(make, users, ks):
    def values(to):
        set_seed(0)
        learn = to(make(users))
        learn.recorder.train_metrics = True
        with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
        return tensor([list(map(float, o)) for o in learn.recorder.values]),learn.xla_report if hasattr(learn, 'xla_opt') else None
    right,_ = values(noop)
    for k in ks:
        now,report = values(lambda l: l.to_xla(steps_per_execution=k))
        test_close(now, right, 1e-5)
        assert not report().beside and not report().plain
        for name in ('training', 'validation'):
            n = report().totals.loc[name]
            assert n['executions'] <= n['batches']/k + (2 if k == 1 else 6)

def test_another_number_of_epochs_is_no_other_step():
    "Between steps that are recorded as one, `pct_train` moves on by a number that depends on it"
    learn = learner(image_dls(n=8*4, bs=4)).to_xla(steps_per_execution=4)
    with warnings.catch_warnings(record=True) as told, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        for n in (2, 1, 3): learn.fit(n, 1e-2)
    assert not [w for w in told if 'audit' in str(w.message)] and not learn.xla_report().plain

class WarmUp(Callback):
    def before_batch(self): self.opt.set_hyper('lr', 1e-3*min(1, (self.train_iter+1)/10))

@pytest.mark.parametrize('cb,why', [(None, None), (WarmUp(), 'WarmUp looks at each batch before its step'),
                                    (GradientAccumulation(10), 'a callback cancels a batch')])
def test_steps_that_are_not_run_as_one_say_so(cb, why):
    learn = image_learner(image_dls(n=24*4, bs=4)).to_xla(steps_per_execution=4)
    with warnings.catch_warnings(record=True) as told, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(2, 1e-3, cbs=cb)
    told = [str(w.message) for w in told if 'steps_per_execution=4' in str(w.message)]
    assert not told if why is None else len(told) == 1 and why in told[0]

def test_statistics_of_every_fourth_batch_are_taken_in_one_kind_of_step():
    cpu,xla = (fitted(o, image_dls(n=30*4, bs=4, shuffle=False), cbs=ActivationStats(every=4)) for o in (False, True))
    report = xla.xla_report()
    assert len(xla.activation_stats.stats) == len(cpu.activation_stats.stats) == 15
    for i in range(2): test_close(tensor(xla.activation_stats.layer_stats(i)), tensor(cpu.activation_stats.layer_stats(i)), 1e-5)
    assert report.per_batch()['executions'] == 1 and sum(report.plain.values()) < 2   # the first sets the hooks up

class Mean(nn.Module):
    def __init__(self): super().__init__(); self.l = nn.Linear(3, 2)
    def forward(self, x): return self.l(x).mean(1)*2

def test_each_of_thirty_lengths_has_its_program():
    items = [(torch.randn(4+i//2, 3), torch.tensor(i%2)) for i in range(60)]
    dls = DataLoaders.from_dsets(items, items[:4], bs=2, shuffle=False, num_workers=0)
    learn = Learner(dls, Mean(), CrossEntropyLossFlat()).to_xla()
    with warnings.catch_warnings(record=True), learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-3)
    assert not learn.xla_report().plain and learn.xla_opt.replay.by_log.fit.counts[True]['replayed'] == 30

class Clips(Callback):
    def before_step(self):
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), getattr(self, 'limit', .05)*2)

def test_an_attribute_that_may_not_be_there_yet_is_no_computed_name():
    "`getattr` with a name and a product in the same function looked as if any attribute could be read, iterators too"
    cpu,xla = (image_learner(image_dls(n=24*4, bs=4, shuffle=False), cbs=Clips()).remove_cb(ProgressCallback) for _ in range(2))
    xla.model.load_state_dict(cpu.model.state_dict())
    xla.to_xla(steps_per_execution=4)
    for l in (cpu, xla):
        with l.no_logging(): l.fit(2, 1e-3)
    test_close(xla.clips.norm.cpu(), cpu.clips.norm, 1e-4)
    assert xla.xla_report().per_batch('training')['executions'] < .5

class Averages(Callback):
    "The weights after each batch"
    def before_fit(self): self.ema = [p.detach().clone() for p in self.model.parameters()]
    def after_batch(self):
        if self.training: torch._foreach_lerp_(self.ema, [p.detach() for p in self.model.parameters()], .5)

def test_a_callback_that_looks_at_the_weights_sees_those_of_each_step():
    def averages(k):
        set_seed(0)
        dls,model = image_dls(n=16*4, bs=4, shuffle=False),nn.Sequential(Flatten(), nn.Linear(64, 4))
        learn = Learner(dls, model, CrossEntropyLossFlat(), cbs=Averages())
        if k: learn.to_xla(steps_per_execution=k)
        with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
        return fetch(learn.averages.ema)
    with pytest.warns(UserWarning, match='Averages may look at the model or its optimizer after each of them'): now = averages(4)
    for a,b in zip(now, averages(0)): test_close(a, b, 1e-5)

class Shaken:
    "Items that draw from the host's random numbers"
    def __len__(self): return 24
    def __getitem__(self, i): return torch.full((6,), i/24) + random.random() + torch.rand(1),torch.tensor([float(i)])

def test_lr_find_leaves_the_random_state_of_the_batches_it_has_done():
    "It ends in the midst of a pass, and those after it are not read"
    def after(xla):
        set_seed(1)
        dls = DataLoaders.from_dsets(Shaken(), Shaken(), bs=4, num_workers=0)
        learn = Learner(dls, nn.Linear(6, 1), loss_func=nn.MSELoss())
        if xla: learn.to_xla(steps_per_execution=3)
        with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=7, show_plot=False, suggest_funcs=None)
        return [random.random(), np.random.rand(), torch.rand(1).item()]
    assert after(True) == after(False)
