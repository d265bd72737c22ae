"A replayed step is a plain step, bit for bit; and where it would not be, it is not replayed"
import pytest
from fastai.callback.training import GradientClip
from common import *
from probe import Probe, breaches
from fastai_xla.all import *
from fastai_xla.norm import RunningBatchNorm
from fastai_xla.convert import convert_norm
from fastai_xla.graphs import rng_state
from fastai_xla.seeds import manual_seed
from fastai_xla.transfer import fetch

pytestmark = pytest.mark.usefixtures('recorded')

def one_cycle(learn): learn.fit_one_cycle(2, 1e-2)

def leaves(o):
    if isinstance(o, dict): return [l for k in sorted(o) for l in leaves(o[k])]
    if isinstance(o, (list, tuple, L)): return [l for v in o for l in leaves(v)]
    return [o]

def left_behind(learn):
    state = [learn.opt.state[p] for p in learn.model.parameters()] if hasattr(learn.opt, 'all_params') else []
    return leaves(fetch([list(learn.model.state_dict().values()), state, learn.recorder.losses,
                         list(learn.recorder.values), learn.recorder.lrs, rng_state()]))

def run(make, fit, replay):
    set_seed(0)
    manual_seed(3)
    learn,probe = make().to_xla(replay=replay),Probe()
    learn.add_cb(probe)
    with learn.no_logging(): fit(learn)
    return learn,probe,left_behind(learn)

def same(a, b, tol):
    if not isinstance(a, torch.Tensor): return a == b
    return torch.equal(a, b) if tol == 0 else torch.allclose(a, b, rtol=tol, atol=tol)

def compare(make, fit=one_cycle, tol=0):
    "Both ways from the same seed; the learner that replayed. A program with other outputs may be fused otherwise: then `tol` is 1e-6"
    _,_,plain = run(make, fit, False)
    learn,probe,replayed = run(make, fit, True)
    assert len(plain) == len(replayed)
    for a,b in zip(plain, replayed): assert same(a, b, tol)
    return learn,probe

def n_runs(learn): return sum(r.runs for recs in learn.xla_opt.replay.kinds.recs.values() if not isinstance(recs, str) for r in recs)

def running(update_every):
    learn = image_learner()
    convert_norm(learn.model, 'running')
    for m in learn.model.modules():
        if isinstance(m, RunningBatchNorm): m.update_every,m.warmup = update_every,30
    return learn

def freezes(learn):
    learn.freeze()
    learn.fit(1, 1e-2)
    learn.unfreeze()
    learn.fit(1, slice(1e-3, 1e-2))

class InPlace(Transform):
    def encodes(self, x:TensorImageBW): return x.div_(2.)

def in_place(): return image_learner(image_dls(after_batch=[InPlace()]))
def normalised(): return image_learner(image_dls(after_batch=[Normalize.from_stats([.1], [.5])]))
def with_cbs(*cbs): return lambda: image_learner(cbs=[cb() for cb in cbs])
def with_opt(opt): return lambda: image_learner(opt_func=opt)

opts = dict(torch_adam=partial(OptimWrapper, opt=torch.optim.Adam), torch_radam=partial(OptimWrapper, opt=torch.optim.RAdam),
    torch_rmsprop=partial(OptimWrapper, opt=torch.optim.RMSprop, momentum=.9))
stories = {n: (with_opt(o), one_cycle) for n,o in opts.items()} | dict(
    smaller_batch=(lambda: image_learner(image_dls(n=120)), one_cycle), normalise=(normalised, one_cycle), in_place=(in_place, one_cycle),
    freeze=(image_learner, freezes), running=(partial(running, 1), one_cycle))
of_several = {n: stories[n] for n in ('torch_adam', 'normalise')} | dict(
    adam=(with_opt(Adam), one_cycle), clip=(with_cbs(partial(GradientClip, .1)), one_cycle),
    bf16=(lambda: image_learner().to_bf16(), one_cycle))

@pytest.mark.parametrize('name', stories)
def test_same_as_plain(name):
    "More in test_replay_matrix.py"
    learn,probe = compare(*stories[name])
    assert not learn.xla_opt.replay.reasons.why, learn.xla_opt.replay.reasons.why
    assert n_runs(learn) % len(probe.rows) == 0 and n_runs(learn) > 0   # the probe has the last fit
    if name == 'normalise':   # also with batch transforms, which are part of the step, it is one execution
        assert not breaches(probe.steady(True)) and not breaches(probe.steady(False))
        assert max(c.to_device for c in probe.steady(True)) <= 5   # a batch, and what has changed of the hyper-parameters

@pytest.mark.parametrize('opt', [partial(torch.optim.Adagrad, lr_decay=.1), torch.optim.Adadelta, torch.optim.Adamax,
                                 partial(torch.optim.Adam, foreach=True)], ids=['adagrad', 'adadelta', 'adamax', 'foreach'])
def test_counts_on_the_host(opt):
    "torch's optimizers count their steps in tensors on the host"
    learn,probe = compare(with_opt(partial(OptimWrapper, opt=opt)), lambda l: l.fit(2, 1e-2))
    assert not learn.xla_opt.replay.reasons.why and n_runs(learn) == len(probe.rows)
    assert {st['step'].item() for st in learn.opt.opt.state.values()} == {2*len(learn.dls.train)}

def test_computes_on_the_host():
    "What they compute with them otherwise is not recorded, and is right all the same"
    learn,_ = compare(with_opt(partial(OptimWrapper, opt=torch.optim.NAdam)), lambda l: l.fit(1, 1e-2))
    assert all('tensor on the CPU' in why for why in learn.xla_opt.replay.reasons.why) and n_runs(learn) == len(learn.dls.valid)

class Causal(Module):
    "The rows of an image as words"
    def __init__(self): self.lin,self.out = nn.Linear(8, 8),nn.Linear(64, 4)
    def forward(self, x):
        x = self.lin(x)
        return self.out(F.scaled_dot_product_attention(x, x, x, is_causal=True).flatten(1))

def causal(): return Learner(image_dls(), Causal(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)

def test_true_is_no_number():
    "A True among the constants, of the mask, is not taken for a counter, so that each batch would be looked at once more"
    _,probe = compare(causal)
    assert not breaches(probe.steady(True)) and not breaches(probe.steady(False))

class Forgets(Callback):
    "Throws the recordings away: each batch is recorded anew"
    def after_batch(self):
        r = self.learn.xla_opt.replay
        r.kinds.recs.clear()
        r.kinds.held.clear()
        r.kinds.key = None
class Beside(Callback):
    "A program of its own at each batch"
    def after_batch(self): self.seen = self.loss*2

def test_probe_sees(without_audits):
    "Whoever records at each batch does not pass, nor what else runs in a batch; audits aside"
    _,probe,_ = run(lambda: image_learner(cbs=Forgets(), opt_func=SGD), one_cycle, True)
    for training,n in ((True, 14), (False, 5)):
        assert all(c.traced for t,_,c in probe.rows if t == training)
        assert len(breaches(probe.steady(training))) == n and len(breaches(probe.steady(training, late=1))) == n-2
    _,probe,_ = run(with_cbs(Beside), one_cycle, True)
    assert len(breaches(probe.steady(True))) == 14 and not breaches(probe.steady(True), executions=2)

scale = dict(of=1.)

class Reads(Callback):
    def after_loss(self): self.seen = self.loss.item()
class Anneals(Callback):
    def after_batch(self): scale['of'] *= .9

def scaled_loss(pred, y): return F.cross_entropy(pred, y)*scale['of']
def annealed():
    scale['of'] = 1.
    return image_learner(cbs=[Anneals()], loss_func=scaled_loss)

def hidden_loss(pred, y): return F.cross_entropy(pred, y)*getattr(hidden, 'sca'+str().join('le'))
class Hidden:
    __slots__ = ('scale',)
hidden = Hidden()
class AnnealsHidden(Callback):
    def after_batch(self): hidden.scale *= .9
def annealed_hidden():
    "Its name does not stand in the code"
    hidden.scale = 1.
    return image_learner(cbs=[AnnealsHidden()], loss_func=hidden_loss)

@pytest.mark.parametrize('name,make,why', [('a read', with_cbs(Reads), 'value of a tensor is read'),
    ('a changing number', annealed, 'scale.*has another value'), ('a hidden number', annealed_hidden, 'constant of the graph changes')])
def test_not_replayed(name, make, why):
    "What a recording would freeze or leave out is retraced, with the reason"
    learn,probe = compare(make)
    assert any(re.search(why, w) for w in learn.xla_opt.replay.reasons.why), learn.xla_opt.replay.reasons.why
    # then it is given up: that one at the third value
    assert (sum(c.traced for t,_,c in probe.rows if t) <= 6
            and sum(c.traced for t,_,c in probe.rows if not t) <= 4 + (name == 'a changing number'))

def test_counts_at_every_batch():
    "A number that a callback keeps within the step goes on"
    class Counts(Callback):
        def before_fit(self): self.n = 0
        def after_loss(self): self.n += 1
    learn,probe = compare(with_cbs(Counts))
    assert learn.counts.n == len(probe.rows) == n_runs(learn)

def test_guard_is_needed(monkeypatch, without_audits):
    "Without the comparison of two traces a changing number is frozen whose name nobody sees"
    from fastai_xla.capture.recording import Recording
    monkeypatch.setattr(Recording, 'verify', lambda self, inputs: None)
    with pytest.raises(AssertionError): compare(annealed_hidden)

def test_exception_within_step():
    "An exception of the user's passes through, and the weights are those of the last whole step"
    class Breaks(Callback):
        def after_pred(self):
            if self.learn.broken: raise ValueError('broken')
    def broken(learn):
        learn.broken = False
        learn.fit(1, 1e-2)
        learn.broken = True
        before = fetch(list(learn.model.parameters()))
        with pytest.raises(ValueError, match='broken'): learn.fit(1, 1e-2)
        for a,b in zip(before, fetch(list(learn.model.parameters()))): assert torch.equal(a, b)
        learn.broken = False
        learn.fit(1, 1e-2)
    compare(with_cbs(Breaks), broken)

def test_other_torch_xla(monkeypatch):
    "Without the private names everything works, plain, with one warning"
    import fastai_xla.graphs as graphs
    monkeypatch.setattr(graphs, '_graph_names', [*graphs._graph_names, '_no_such_name'])
    with pytest.warns(UserWarning, match='_no_such_name'): learn = image_learner().to_xla(replay=True)
    with learn.no_logging(): learn.fit(1, 1e-2)
    assert learn.xla_opt.replay is None

@pytest.mark.parametrize('name', of_several)
def test_steps_per_execution(name):
    "Four steps as one program: the numbers of one by one, a quarter of the executions, and what is left over goes one by one"
    make,fit = of_several[name]
    def four():
        learn = make()
        learn.dls.loaders[0] = learn.dls.train.new(shuffle=False)
        return learn
    _,_,one = run(four, fit, True)
    set_seed(0)
    manual_seed(3)
    learn,probe = four().to_xla(replay=True, steps_per_execution=4),Probe()
    learn.add_cb(probe)
    with learn.no_logging(): fit(learn)
    for a,b in zip(one, left_behind(learn), strict=True): torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert [c.executions for c in probe.steady(True)][-8:] == [1, 0, 0, 0]*2

def test_several_that_skip():
    "Layers that skip most updates, by counters of their own: several steps as one program give the numbers of one by one"
    left = []
    for k in (1, 4):
        set_seed(0)
        manual_seed(3)
        learn = running(3)
        learn.dls.loaders[0] = learn.dls.train.new(shuffle=False)
        learn.to_xla(steps_per_execution=k)
        with learn.no_logging(), learn.no_bar(): one_cycle(learn)
        left.append(left_behind(learn) + [m.step for m in learn.model.modules() if isinstance(m, RunningBatchNorm)])
    for a,b in zip(*left, strict=True): torch.testing.assert_close(a, b, rtol=0, atol=1e-6)

def test_counts_at_every_batch_of_several():
    "Callbacks around the step run at each batch, with its own loss and learning rate"
    class Notes(Callback):
        def before_fit(self): self.seen = []
        def after_batch(self): self.seen.append((self.iter, self.training, self.loss, self.opt.hypers[-1]['lr']))
    seen = []
    for k in (1, 4):
        set_seed(0)
        learn = image_learner(image_dls(n=16*10, shuffle=False), cbs=Notes()).to_xla(steps_per_execution=k)
        with learn.no_logging(): learn.fit_one_cycle(2, 1e-2)
        seen.append([(i, t, l.item(), lr) for i,t,l,lr in fetch(learn.notes.seen)])
    assert [o[:2]+o[3:] for o in seen[0]] == [o[:2]+o[3:] for o in seen[1]]
    for a,b in zip(*seen): assert abs(a[2]-b[2]) < 1e-6

def test_batches_by_hand():
    "Where batches are done by hand, anything may have changed between them"
    outs = []
    for replay in (False, True):
        set_seed(0)
        manual_seed(3)
        learn = image_learner().to_xla(replay=replay)
        with learn.no_logging(): learn.fit(2, 1e-2)
        batches = list(learn.dls.valid)
        learn.dl = learn.dls.valid
        learn.remove_cb(ProgressCallback)('before_validate')
        preds = []
        for i,b in enumerate(batches):
            learn.model[1][0][1].train(i >= 2)   # its batch norm, when the step is recorded and proved
            learn.one_batch(i, b)
            preds.append(learn.pred)
        outs.append(fetch(preds))
    for a,b in zip(*outs): assert torch.equal(a, b)
