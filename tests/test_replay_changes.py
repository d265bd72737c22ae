"""Whatever changes between two steps, replayed training goes on as plain training does, bit for bit

The controls show that each guard is needed."""
from contextlib import nullcontext
from functools import lru_cache
import pytest
from common import *
from test_replay_matrix import differences
from fastai_xla.all import *
from fastai_xla.capture import plan, step
from fastai_xla.capture.step import Trace
from fastai_xla.capture.recording import Recording
from fastai_xla.capture.values import Numbers
from fastai_xla.capture.watch import Watch
from changes import *
from changes_around import *

pytestmark = pytest.mark.usefixtures('recorded')

cases = [(n, k, make, f) for n,make,fs in [('flag', learner, flags), ('attr', learner, attrs), ('attr', times_learner, times_attrs),
    ('hook', learner, hook_stories), ('param', learner, params), ('opt', learner, optims),
    ('torch_opt', torch_learner, torch_optims), ('adamw', adamw_learner, adamw_optims), ('loss', learner, losses),
    ('loss_attr', lambda: learner(loss_func=Weighs()), loss_attrs), ('cb', learner, callbacks), ('cancel', learner, cancels),
    ('data', learner, data), ('tfm', half_learner, tfm_stories), ('around', learner, around), ('two', learner, two),
    ('count', crops_learner, dict(tfm=between())), ('aug', aug_learner, dict(p=between(p_of(0.), p_of(1.))))] for k,f in fs.items()]

# All of them are run by `python tests/test_replay_changes.py [names]`; as tests, those that differ in kind
tested = """flag-freeze flag-freeze_during flag-layer_eval flag-requires_grad_during
    attr-dropout_during attr-bn_momentum attr-stride
    hook-during_forward hook-between_backward hook-during_param
    param-parameter param-data param-in_place_before_batch param-buffer_during param-model param-stale_grad param-load param-load_opt
    opt-reset opt-other opt-lr_within opt-do_wd opt-clear torch_opt-maximize
    adamw-load adamw-one_count adamw-cycle loss-lambdas
    cb-added_during cb-reapplied cb-noise cb-resizes cancel-CancelBatchException_after_pred
    data-ragged data-other_size data-added_tfm
    around-lr_find around-get_preds around-interrupt around-broken around-bf16 around-one_plain
    two-two two-one_model aug-p count-tfm""".split()

def test_names(): assert {*tested} <= {f'{a}-{b}' for a,b,*_ in cases}

@pytest.mark.parametrize('make,story', [c[2:] for c in cases if f'{c[0]}-{c[1]}' in tested],
                         ids=[f'{a}-{b}' for a,b,*_ in cases if f'{a}-{b}' in tested])
def test_change(make, story): compare(make, story)

def weighs(l): l.loss_func.func.weight = torch.tensor([1.,2.,3.,4.]).to(l.pred.device)
def weighs_not(l): l.loss_func.func.weight = None

def test_a_buffer_that_comes_and_goes(without_audits):
    "A buffer that is `None` at first"
    compare(learner, seq(lambda l: l.fit(1, 1e-2), during(weighs, weighs_not)))

# Where the numbers are not the same

def smoothed(losses, counted):
    "Batch -> fastai's smoothed loss after it, worked out from the `losses` of the batches in `counted`"
    res,val = {},0.
    for n,i in enumerate(counted, 1):
        val = .98*val + .02*losses[i].item()
        res[i] = val/(1-.98**n)
    return res

def test_cancelled_before_the_recorder():
    "A callback that cancels in `after_batch`, before the recorder: that batch is in no smoothed loss"
    class Losses(Callback):
        order = -5
        def before_fit(self): self.seen = []
        def after_batch(self):
            if self.training: self.seen.append(self.loss)
    def story(l):
        cbs = [Losses(), Cancels(CancelEpochException, 'after_batch')]
        assert all(cb.order < l.recorder.order for cb in cbs)
        l.fit(3, 1e-2, cbs=cbs)
        return [dict(batches=cbs[0].seen)]
    (_,_,plain),(r,counts,replayed) = run(learner, story, False),run(learner, story, True)
    assert counts['replayed'] == counts['batches'] and not r.xla_opt.replay.reasons.why
    assert not differences(plain, replayed)
    seen,recorded = plain['0']['batches'],[0, 1, 3, 4, 6, 7]   # the third batch of each of three epochs is cancelled
    smooth = smoothed(seen, recorded)
    losses = [v for k,v in plain.items() if k.startswith('.losses')]
    for i,l in zip(recorded, losses, strict=True): assert abs(smooth[i]-l) < 1e-5, (i, smooth[i], l)

# Each guard is needed: without it the same story ends otherwise

def one_cycle(l): l.fit_one_cycle(1, 1e-2)
written = []
class Logs(Callback):
    def after_loss(self): written.append(self.learn.iter)
def logs(l):
    written.clear()
    l.fit(2, 1e-2, cbs=Logs())
    return [dict(n=len(written), sum=sum(written))]

_now,_add = Watch.now,Numbers._add
def all_but_lr(self, d, *args, **kwargs): return None if 'lr' in d and 'mom' in d else _add(self, d, *args, **kwargs)
controls = dict(lr=(one_cycle, [(Numbers, '_add', all_but_lr), (Recording, 'verify', noop)]),
    grad=(during(grads), [(Watch, 'now', lambda self: (_now(self)[0], [o for o in _now(self)[1] if not isinstance(o, bool)]))]),
    seed=(one_cycle, [(plan, 'advance_rng', noop)]),
    counter=(counts, [(Trace, '_count', noop)]), log=(logs, [(step, 'no_effects', nullcontext)]))

@lru_cache
def retraced(make, story): return run(make, story, False)[2]

def sgd_learner(): return learner(opt_func=SGD)

@pytest.mark.parametrize('name', controls)
def test_control(name, monkeypatch, without_audits):
    story,guards = controls[name]
    make = learner if name != 'lr' else sgd_learner
    plain = retraced(make, story)
    assert not differences(plain, run(make, story, True)[2])
    for o,k,f in guards: monkeypatch.setattr(o, k, f)
    assert differences(plain, run(make, story, True)[2])

def test_untracked_lr(monkeypatch):
    "With one guard less, the next one finds it: the schedule counts in numpy, which takes the other numbers as they are"
    plain = retraced(learner, one_cycle)
    monkeypatch.setattr(Numbers, '_add', all_but_lr)
    learn,_,left = run(learner, one_cycle, True)
    assert not differences(plain, left)
    assert any('Python numbers decide' in w for w in learn.xla_opt.replay.reasons.why)
