"What changes for some batches only, after the first audits: of a library's code, and in the user's hands"
from collections import OrderedDict
import fastai.optimizer
from on_both import *

def long_dls(): return image_dls(n=18*8, n_valid=2*8, bs=8, shuffle=False)

class Turns(Callback):
    "After some batches, of which none is one of an audit's"
    def __init__(self, to): self.to = to
    def after_batch(self):
        if self.training and self.iter in (9, 12): self.to(self.learn, self.iter == 9)

class Doubles(Callback):
    "Code of the user's within the step"
    def after_pred(self): self.learn.pred = self.pred*1.

def check(net, to, *cbs):
    def make(): return Learner(long_dls(), net(), loss_func=CrossEntropyLossFlat(), cbs=[Turns(to), *cbs])
    return compare(make, partial(fits, n=1))

@pytest.mark.parametrize('cbs', [[], [Doubles()]], ids=['libraries', 'users'])
def test_keywords_of_an_activation(cbs):
    def net():
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0., activation=partial(F.leaky_relu, negative_slope=.1))
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), layer, nn.Linear(8, 4))
    def to(learn, on): learn.model[2].activation.keywords['negative_slope'] = 3. if on else .1
    check(net, to, *cbs)

@pytest.mark.parametrize('cbs', [[], [Doubles()]], ids=['libraries', 'users'])
def test_the_order_of_layers(cbs):
    def net(): return nn.Sequential(OrderedDict(flat=nn.Flatten(), first=nn.Linear(64, 8), act=nn.Tanh(), last=nn.Linear(8, 4)))
    def to(learn, on):
        act,last = learn.model.act,learn.model.last
        del learn.model.act, learn.model.last
        for n,m in (('last', last), ('act', act)) if on else (('act', act), ('last', last)): setattr(learn.model, n, m)
    check(net, to, *cbs)

def normed(**kwargs):
    last = nn.AdaptiveAvgPool2d(1),nn.Flatten(),nn.Linear(4, 4)
    return nn.Sequential(nn.Conv2d(1, 4, 3), RunningBatchNorm2d(4, **kwargs), nn.ReLU(), *last)

@pytest.mark.parametrize('name,value', [('momentum', .9), ('eps', .5), ('update_every', 3)])
@pytest.mark.parametrize('cbs', [[], [Doubles()]], ids=['libraries', 'users'])
def test_settings_of_running_batchnorm(cbs, name, value):
    was = getattr(normed()[1], name)
    def to(learn, on): setattr(learn.model[1], name, value if on else was)
    check(partial(normed, warmup=40), to, *cbs)

def test_momentum_of_running_batchnorm_between_fits():
    learn = Learner(long_dls(), normed(), loss_func=CrossEntropyLossFlat()).to_xla(replay=True)
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('error')   # an audit would tell of batches with an old value
        learn.fit(1)
        learn.model[1].momentum = .5
        learn.fit(1)
    assert not learn.xla_opt.replay.fit.plain

# Functions of libraries that a user replaces for some batches

def halved(f): return lambda *args, **kwargs: f(*args, **kwargs)*.5
def clips(f): return lambda self: nn.utils.clip_grad_norm_(self.parameters(), 1e-3)
def clips_more(f): return lambda ps, *args, **kwargs: f(ps, 1e-3)
def doubled(f): return lambda self, *args, **kwargs: f(self*2, *args, **kwargs)

replaced = dict(method=(GradientClip, 'before_step', clips), called_by_it=(nn.utils, 'clip_grad_norm_', clips_more),
    of_the_optimizer=(fastai.optimizer, 'debias', halved), of_tensors=(torch.Tensor, 'flatten', doubled))

@pytest.mark.parametrize('case', replaced)
def test_functions_of_libraries(case, monkeypatch):
    owner,name,other = replaced[case]
    was = getattr(owner, name)
    def to(learn, on):
        if on: monkeypatch.setattr(owner, name, other(was))
        else: monkeypatch.undo()
    check(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), to, GradientClip(.01))

def test_metrics_in_training_are_turned_on_within_an_epoch():
    def to(learn, on): learn.recorder.train_metrics = on
    for there in (noop, Learner.to_xla):   # nothing has reset them
        learn = there(Learner(long_dls(), mlp(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=Turns(to)))
        with learn.no_bar(), learn.no_logging(), pytest.raises(AttributeError, match='total'): learn.fit(1)
