"Every parameter that the optimizer holds is the model's own, is on the XLA device, and moves in a step"
import warnings
import pytest, torch
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.runtime import is_xla
from fastai_xla.transfer import fetch
from common import *

def held(learn): return [p for pg in learn.opt.param_lists for p in pg]

def holds(learn, trained=None):
    "Does the optimizer hold exactly the model's parameters, on XLA, and do those that should move in a fit?"
    learn.remove_cb(ProgressCallback)
    own = list(learn.model.parameters())
    assert {id(p) for p in held(learn)} == {id(p) for p in own}
    assert all(is_xla(p) for p in own)
    before = fetch([p.detach().clone() for p in own])
    with learn.no_logging(): learn.fit(1, 1e-2)
    assert all(is_xla(p) for p in own) and {id(p) for p in held(learn)} == {id(p) for p in learn.model.parameters()}
    for p,b in zip(fetch([p.detach().clone() for p in own]), before):
        if trained is None or trained(p): assert (p-b).abs().max() > 0
    return True

def biases_aside(p): return p.dim() > 1

def new_head(learn): learn.model[1][3] = nn.Linear(8, 4)

class NewHead(Callback):
    def before_fit(self): new_head(self.learn)

stories = dict(
    to_xla=lambda l,d: l.to_xla().create_opt(),
    opt_before=lambda l,d: (l.create_opt(), l.to_xla()),
    opt_again=lambda l,d: (l.create_opt(), l.to_xla(), l.create_opt()),
    fit_cpu_between=lambda l,d: (l.to_xla(), l.fit(1), l.detach_xla(), l.fit(1), l.to_xla()),
    load=lambda l,d: (l.to_xla(), l.fit(1), l.save('m'), l.load('m')),
    unfreeze=lambda l,d: (l.to_xla(), l.freeze(), l.fit(1), l.unfreeze()),
    new_model=lambda l,d: (l.to_xla(), l.fit(1), setattr(l, 'model', convnet()), l.fit(1)),
    new_model_opt=lambda l,d: (l.to_xla(), l.fit(1), setattr(l, 'model', convnet()), l.create_opt()),
    new_model_freeze=lambda l,d: (l.to_xla(), l.fit(1), setattr(l, 'model', convnet()), l.freeze(), l.unfreeze()),
    new_model_before=lambda l,d: (l.create_opt(), setattr(l, 'model', convnet()), l.to_xla()),
    new_head=lambda l,d: (l.to_xla(), l.fit(1), new_head(l), l.fit(1)),
    new_head_at_the_start=lambda l,d: (l.to_xla(), l.fit(1, cbs=NewHead())),
    moved_by_hand=lambda l,d: (l.create_opt(), l.model.to(device()), l.to_xla()),
    moved_away=lambda l,d: (l.to_xla(), l.fit(1), l.model.to('cpu'), l.fit(1)),
    lr_find=lambda l,d: (l.to_xla(), l.lr_find(num_it=8, show_plot=False)),
    export=lambda l,d: (l.to_xla(), l.fit(1), l.export()),
    new_dls=lambda l,d: (l.to_xla(), l.fit(1), setattr(l, 'dls', image_dls()), l.fit(1)),
    twice=lambda l,d: (l.to_xla().to_xla(), l.create_opt()),
)

# on the CPU these train nothing
told = 'new_model new_model_freeze new_model_before new_head new_head_at_the_start moved_by_hand'.split()

@pytest.mark.parametrize('story', stories)
def test_holds(story, tmp_path):
    learn = image_learner(path=tmp_path, opt_func=partial(SGD, mom=.9)).remove_cb(ProgressCallback)
    with learn.no_logging(), warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        stories[story](learn, tmp_path)
    assert ['made anew' in str(w.message) for w in ws].count(True) == (story in told)
    assert holds(learn, biases_aside)

def test_state_survives(tmp_path):
    "Momentum is neither lost nor left behind where the model moves"
    learn = image_learner(path=tmp_path, opt_func=partial(SGD, mom=.9)).remove_cb(ProgressCallback)
    with learn.no_logging(): learn.fit(1)
    before = [learn.opt.state[p]['grad_avg'].clone() for p in held(learn)]
    learn.to_xla()
    assert all(is_xla(learn.opt.state[p]['grad_avg']) for p in held(learn))
    learn.detach_xla()
    for p,b in zip(held(learn), before): assert torch.equal(learn.opt.state[p]['grad_avg'], b)

def test_optimizer_is_kept_while_another_model_predicts():
    "An average of the weights, or the best ones, for a validation between two fits"
    learn = image_learner().remove_cb(ProgressCallback).to_xla()
    with learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.fit(1)
        opt,raw,steps = learn.opt,learn.model,[s['step'] for s in learn.opt.state.values()]
        learn.model = deepcopy(raw)
        learn.validate()
        learn.get_preds()
        learn.model = raw
        learn.fit(1)
    assert learn.opt is opt and [s['step'] for s in learn.opt.state.values()] == [2*n for n in steps]

def test_wrapped_optimizer_instance():
    "An OptimWrapper made from the model's parameters beforehand trains them all the same"
    model = convnet()
    opt = OptimWrapper(opt=torch.optim.SGD(model.parameters(), lr=.1, momentum=.9))
    learn = Learner(image_dls(), model, loss_func=CrossEntropyLossFlat(), opt_func=opt).remove_cb(ProgressCallback).to_xla()
    learn.create_opt()
    assert holds(learn, biases_aside)

def test_historic_fault():
    "The optimizer made before the model has moved: what the other tests would miss if they could not fail"
    learn = image_learner().remove_cb(ProgressCallback)
    learn.create_opt()
    learn.model.to(device())
    learn.dls.to(device())
    with pytest.raises(AssertionError): holds(learn)

def test_strange_parameters():
    "Parameters on the CPU that the splitter brings from elsewhere are refused"
    extra = nn.Parameter(torch.ones(3))
    learn = image_learner(splitter=lambda m: [list(m.parameters()), [extra]]).remove_cb(ProgressCallback).to_xla()
    with pytest.raises(RuntimeError, match='not the model\'s.*create_opt'): learn.fit(1)

def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b,self.pool = nn.Linear(8, 8),nn.Linear(8, 8),nn.Linear(64, 4)
            self.b.weight = self.a.weight
        def forward(self, x): return self.pool(self.b(self.a(x)).flatten(1))
    learn = Learner(image_dls(), Tied(), loss_func=CrossEntropyLossFlat()).remove_cb(ProgressCallback).to_xla()
    with learn.no_logging(): learn.fit(1)
    assert learn.model.a.weight is learn.model.b.weight
    learn.detach_xla()
    assert learn.model.a.weight is learn.model.b.weight

class Codebook(Module):
    "With an optimizer of its own for its codes, as `vector-quantize-pytorch` has"
    def __init__(self):
        self.enc,self.head,self.code = nn.Linear(6, 8),nn.Linear(8, 3),nn.Embedding(4, 8)
        self.own = torch.optim.SGD(self.code.parameters(), lr=.5)
    def forward(self, x):
        h = self.enc(x)
        i = (h[:,None]-self.code.weight).pow(2).sum(2).argmin(1)
        if self.training:
            F.mse_loss(self.code(i), h.detach()).backward()
            self.own.step()
            self.own.zero_grad()
        return self.head(h + (self.code(i)-h).detach())

class Centers(Module):
    def __init__(self): self.at = nn.Parameter(torch.zeros(3))
    def forward(self, p, y): return F.cross_entropy(p, y) + (p-self.at[y][:,None]).pow(2).mean()

class TrainsCenters(Callback):
    def __init__(self, ps): self.own = torch.optim.SGD(ps, lr=.5)
    def before_batch(self): self.own.zero_grad()
    def after_step(self): self.own.step()

class Lasso(Callback):
    def __init__(self, ps): self.ps = list(ps)
    def after_loss(self): self.learn.loss_grad = self.loss_grad + .05*sum(p.abs().sum() for p in self.ps)

def codebook(): return Codebook(),nn.CrossEntropyLoss(),[]
def centers():
    loss = Centers()
    return nn.Linear(6, 3),loss,[TrainsCenters(loss.parameters())]
def lasso():
    m = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    return m,nn.CrossEntropyLoss(),[Lasso(m.parameters())]

@pytest.mark.parametrize('make', [codebook, centers, lasso])
def test_who_has_kept_parameters_has_the_moved_ones(make):
    def fit(replay):
        torch.manual_seed(0)
        x = torch.randn(48, 6)
        items = list(zip(x, x[:,:3].argmax(1)))
        dls = DataLoaders(DataLoader(items[:32], bs=8), DataLoader(items[32:], bs=8))
        m,loss,cbs = make()
        learn = Learner(dls, m, loss_func=loss, opt_func=SGD, cbs=cbs)
        if replay is not None: learn.to_xla(replay=replay)
        with learn.no_bar(), learn.no_logging(): learn.fit(3, .1)
        losses = torch.tensor([float(l) for l in learn.recorder.losses])
        return torch.cat([losses, *(p.detach().cpu().flatten() for m in (learn.model, loss) for p in m.parameters())])
    cpu = fit(None)
    for replay in (False, 'auto'): test_close(fit(replay), cpu, eps=1e-4)

def test_parameters_stay_the_same_objects_after_a_fit_on_the_cpu():
    "Whose last loss still has a graph"
    learn = image_learner()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    ps = list(learn.model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter('error')   # nothing is made anew
        learn.to_xla()
        assert all(p is q and is_xla(p) for p,q in zip(ps, learn.model.parameters()))
        assert holds(learn, biases_aside)
