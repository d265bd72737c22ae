"Aliases of weights, hooks of gradients, copies of a learner and its data, around steps that are replayed"
import contextvars, pickle, warnings
from copy import deepcopy
import pytest
from fastai.callback.hook import hook_output
from fastai.callback.training import GradientAccumulation
from common import *
from reading import *
from test_replay import compare, n_runs, run
from fastai_xla.all import *
from fastai_xla.runtime import device
from fastai_xla.transfer import fetch

pytestmark = pytest.mark.usefixtures('recorded')

box = []

# Aliases, copies, hooks

def parameters(learn): return [p.detach() for p in learn.model.parameters()]
def all_state(learn): return list(learn.model.state_dict().values())

@pytest.mark.parametrize('when,aliases', [('before', parameters), ('between', parameters), ('before', all_state)])
def test_alias(aliases, when):
    "An alias of the weights goes along with them"
    def fits(learn):
        if when == 'between': learn.fit(1, 1e-2)
        held = aliases(learn)
        learn.fit(2, 1e-2)
        for a,b in zip(fetch(held), fetch(aliases(learn)), strict=True): assert torch.equal(a, b)
    learn,_ = compare(learner, fits)
    assert any('alias' in why for why in learn.xla_opt.replay.reasons.why)

def test_weights_loaded_twice():
    "Weights that are kept on the device can be loaded again"
    def fits(learn):
        learn.fit(1, 1e-2)
        first = {k: v.clone() for k,v in learn.model.state_dict().items()}
        before = fetch(first)
        for _ in range(2):
            learn.fit(1, 1e-2)
            learn.model.load_state_dict(first)
        for k,v in fetch(first).items(): assert torch.equal(v, before[k])
        learn.fit(1, 1e-2)
    compare(learner, fits)

def test_gradient_hook():
    "fastai's own hook of gradients"
    def fit(learn):
        with hook_output(learn.model[0], grad=True) as h: learn.fit(2, 1e-2)
        box.append(fetch(h.stored[0]))
    box.clear()
    compare(learner, fit)
    assert torch.equal(*box)

class Noise(Callback):
    "Langevin noise on the weights"
    def after_batch(self):
        if self.training:
            with torch.no_grad():
                for p in self.model.parameters(): p += torch.randn_like(p)*1e-2

@pytest.mark.parametrize('layers', [(), (nn.Dropout(.2),)])
def test_drawn_after_batch(layers):
    learn,_ = compare(lambda: learner(ce, *layers, cbs=Noise()), tol=1e-6)
    assert not learn.xla_opt.replay.reasons.why

class Restores(Callback):
    def before_batch(self): self.y,self.learn.yb = self.yb,(1-self.yb[0].clamp(max=1),)
    def after_batch(self): self.learn.yb = self.y

def test_changed_after_batch():
    "Metrics are computed after a callback that changes what they are computed of"
    make,fit = lambda: learner(cbs=Restores()),lambda l: l.fit(2, 1e-2)
    plain,*_ = run(make, fit, False)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='.*before the recorder')   # its code says so, before the first batch
        replayed,*_ = run(make, fit, True)
    for a,b in zip(replayed.recorder.values, plain.recorder.values, strict=True): test_close(a, b, eps=1e-6)

# The learner around it

def test_new_data_keeps_state():
    "New dataloaders, validated before they are trained on: the optimizer goes on"
    def fits(learn):
        learn.fit(1, 1e-2)
        learn.dls = image_dls()
        learn.validate()
        learn.fit(1, 1e-2)
    learn,_ = compare(partial(learner, opt_func=Adam), fits)
    assert all(st['step'] == 2*len(learn.dls.train) for st in learn.opt.state.values())

@pytest.mark.parametrize('copied', [deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copied_after_fit(copied):
    learn = image_learner().to_xla()
    with learn.no_logging():
        learn.fit(1, 1e-2)
        other = copied(learn)
        other.fit(1, 1e-2)
    assert n_runs(other) > 0 and other.xla_opt.replay.learn is other

def test_mixed_precision_accumulated():
    "Several as one is refused there, and autocast left: the numbers of one by one"
    def trained(**kw):
        set_seed(0)
        learn = learner(cbs=GradientAccumulation(48)).to_bf16().to_xla(**kw)
        with learn.no_logging(): learn.fit(2, 1e-2)
        assert not torch.is_autocast_enabled('xla')
        return fetch(list(learn.model.state_dict().values()))
    for a,b in zip(trained(replay=False), trained(steps_per_execution=2)): assert torch.equal(a, b)

class Breaks:
    "Ten batches of 4, and then an exception"
    def __len__(self): return 80
    def __getitem__(self, i):
        if i == 42: raise ValueError('no item 42')
        return torch.full((3,), i/80), i % 2

def test_trained_before_exception():
    "With several steps as one, too, batches before the one that cannot be read are trained on"
    def trained(**kw):
        set_seed(0)
        dls = DataLoaders.from_dsets(Breaks(), Breaks(), bs=4, shuffle=False, drop_last=False, num_workers=0)
        learn = Learner(dls, nn.Linear(3, 2), loss_func=F.cross_entropy, opt_func=SGD, metrics=[]).to_xla(**kw)
        with learn.no_logging(), learn.no_bar(), pytest.raises(ValueError, match='no item 42'): learn.fit(1, 1e-1)
        return fetch(list(learn.model.state_dict().values()))
    for a,b in zip(trained(replay=False), trained(steps_per_execution=4)): test_close(a, b, eps=1e-6)

def test_hyper_after_batch():
    "With several steps as one, what a callback sets in `after_batch` stays"
    class Decays(Callback):
        def after_batch(self):
            if self.training: self.opt.set_hyper('lr', self.opt.hypers[-1]['lr']*.9)
    learn = learner(cbs=Decays()).to_xla(steps_per_execution=4)
    with learn.no_logging(): learn.fit(1, 1e-2)
    test_close(learn.opt.hypers[-1]['lr'], 1e-2*.9**len(learn.dls.train), eps=1e-9)

# Data

class Graphs:
    "Items that depend on a parameter"
    w = torch.ones(3, requires_grad=True)
    def __len__(self): return 16
    def __getitem__(self, i): return self.w*i, i % 2

def test_items_with_a_graph():
    dls = DataLoaders.from_dsets(Graphs(), Graphs(), bs=4, num_workers=0)
    learn = Learner(dls, nn.Linear(3, 2), loss_func=F.cross_entropy, metrics=[]).to_xla()
    with learn.no_logging(), learn.no_bar(): learn.fit(1, 1e-2)
    assert Graphs.w.grad is not None

def test_table_like_fastai():
    "A table's pass draws the number that fastai's draws, and keeps what `retain` does"
    from torch.utils.data import TensorDataset
    ds = TensorDataset(torch.arange(12.), torch.arange(12))
    for kw in ({}, dict(retain=lambda res, b: L(res))):
        states = []
        for dev in ('cpu', device()):
            set_seed(0)
            dls = DataLoaders.from_dsets(ds, ds, bs=4, num_workers=0, device=dev, **kw)
            bs = list(dls.train)
            states.append((torch.get_rng_state(), [type(b) for b in bs], [b[1].tolist() for b in bs]))
        assert torch.equal(states[0][0], states[1][0]) and states[0][1:] == states[1][1:]

class Sees:
    "Items for which the model is asked"
    def __len__(self): return 32
    def __getitem__(self, i): return torch.full((3,), float(i)), int(self.model(torch.ones(1, 3).to(device())).sum().item() > 100)

def test_dataset_asks_the_model():
    ds = Sees()
    dls = DataLoaders.from_dsets(ds, ds, bs=4, num_workers=0)
    learn = Learner(dls, nn.Linear(3, 2), loss_func=F.cross_entropy, metrics=[]).to_xla()
    ds.model = learn.model
    with learn.no_logging(), learn.no_bar(): learn.fit(2, 1e-2)
    assert len(learn.recorder.losses) == 16

var = contextvars.ContextVar('var', default=0)
class Context:
    def __len__(self): return 32
    def __getitem__(self, i): return torch.full((1,), var.get())

def test_context():
    "A dataset sees the context variables of whoever reads it, ahead too"
    var.set(7)
    dls = DataLoaders.from_dsets(Context(), Context(), bs=4, num_workers=0, device=device())
    assert torch.cat([b.cpu() for b in dls.train]).eq(7).all()

def adversary(learn):
    "Steps of a network of its own through the learner's model, whose gradients the next step of that adds to its own"
    net = nn.Linear(4, 64)
    for p in net.parameters(): p.data.fill_(.1)
    opt = torch.optim.Adam(net.to(learn.model[1].weight.device).parameters(), .1)
    def after_batch(cb):
        if not cb.training: return
        dev = net.weight.device
        loss = F.cross_entropy(cb.model(net(torch.ones(8, 4, device=dev)).view(8, 1, 8, 8)), torch.zeros(8, dtype=torch.long, device=dev))
        opt.zero_grad()
        loss.backward()
        opt.step()
    return Callback(after_batch=after_batch)

def test_gradients_that_a_callback_leaves_are_no_other_graph():
    "They are views, of which torch_xla traces now the view and now its base: an audit took that for another step"
    from on_both import compare, plain
    def make():
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4))
        return Learner(image_dls(n=8*8, n_valid=8, bs=8, shuffle=False), model, loss_func=CrossEntropyLossFlat())
    def fits(learn):
        for cbs in (adversary(learn), None): learn.fit(2, 1e-2, cbs=cbs)
    learn = compare(make, fits)
    assert not plain(learn) and learn.xla_report().audits['training'] > 1
