"What a fit finds after a detour: parts of the model that have been on the CPU, and fits that ended in an exception"
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import own_process, pytest, torch
from torch import nn
from fastai.vision.all import *
from fastai_xla.all import *
from common import *

def mlp(): return nn.Sequential(nn.Sequential(Flatten(), nn.Linear(64, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 4)))

def small(xla=None, opt=Adam, cbs=(), model=mlp, **kwargs):
    "A learner with 4 batches of training and 2 of validation; on XLA with the arguments `xla` for `to_xla`"
    torch.manual_seed(0)
    kwargs = dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy, splitter=params_of) | kwargs
    dls = image_dls(n=4*16, n_valid=2*16, shuffle=False)
    learn = Learner(dls, model(), opt_func=opt, cbs=list(cbs), **kwargs).remove_cb(ProgressCallback)
    return learn if xla is None else learn.to_xla(**xla)

def host(ts): return [t.detach().cpu() for t in ts]
def weights(learn): return host(learn.model.parameters())

def assert_same(got, expected, tol=2e-5):
    assert len(got) == len(expected)
    for a,b in zip(got, expected): assert (a-b).abs().max() <= tol*b.abs().max().clamp(min=1e-2)

torch_adam,torch_sgd = partial(OptimWrapper, opt=torch.optim.Adam),partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9)
opts = dict(adam=Adam, ranger=ranger, torch_adam=torch_adam, torch_sgd=torch_sgd)

def part(learn): learn.model[0].cpu()
def whole(learn): learn.model.to('cpu')
def there_and_back(learn): learn.model.cpu().to(learn.dls.device)

class AtEpochEnd(Callback):
    "Does `f` to the learner after each epoch"
    def __init__(self, f): self.f = f
    def after_epoch(self): self.f(self.learn)

def two_fits(learn, trip=noop):
    with learn.no_logging():
        learn.fit(1, 1e-2)
        trip(learn)
        learn.fit(1, 1e-2)
    return learn

@lru_cache
def without_trip(opt): return weights(two_fits(small(opt=opts[opt])))

@pytest.mark.parametrize('opt', ['ranger', 'torch_adam', 'torch_sgd'])
def test_optimizer_state_survives_a_trip_to_the_cpu(opt):
    assert_same(weights(two_fits(small({}, opts[opt]), part)), without_trip(opt))

@pytest.mark.parametrize('trip', [whole, there_and_back])
def test_a_callback_may_take_the_model_to_the_cpu_between_epochs(trip):
    def run(xla=None):
        learn = small(xla, cbs=[AtEpochEnd(trip)])
        with learn.no_logging(): learn.fit(2, 1e-2)
        return learn
    expected,got = run(),run({})
    assert_same(weights(got), weights(expected))
    assert_same([tensor(got.recorder.values)], [tensor(expected.recorder.values)])

def test_frozen_parameters_are_as_frozen_after_a_trip_to_the_cpu():
    "fastai goes on stepping a parameter whose gradient is zeros, by weight decay and momentum"
    def run(xla=None):
        learn = small(xla)
        with learn.no_logging():
            learn.fit(1, 1e-2)
            learn.freeze()
            learn.model.cpu()
            learn.fit(1, 1e-2)
        return learn
    assert_same(weights(run({})), weights(run()))

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp,self.a,self.b = nn.Sequential(Flatten(), nn.Linear(64, 8)),nn.Linear(8, 8),nn.Linear(8, 8)
        self.b.weight = self.a.weight
    def forward(self, x): return self.b(self.a(self.inp(x)).relu())

def test_tied_weights_are_tied_after_a_trip_to_the_cpu():
    def run(xla=None): return two_fits(small(xla, model=Tied, splitter=params), whole)
    got = run({})
    assert got.model.a.weight is got.model.b.weight
    assert_same(weights(got), weights(run()))

@pytest.mark.parametrize('opt', ['adam', 'torch_adam'])
def test_detaching_with_a_part_on_the_cpu_keeps_its_optimizer_state(opt):
    def leave(learn):
        part(learn)
        learn.detach_xla()
    assert_same(weights(two_fits(small({}, opts[opt]), leave)), without_trip(opt))

def test_gradient_hooks_survive_a_trip_to_the_cpu():
    learn,n = small(dict(replay=False)),[]
    learn.model[0][1].weight.register_hook(lambda g: n.append(1))
    two_fits(learn, whole)
    assert len(n) == 8

@pytest.mark.parametrize('opt', ['adam', 'torch_adam'])
def test_a_new_head_leaves_the_body_its_optimizer_state(opt):
    learn = small({}, opts[opt])
    with learn.no_logging(): learn.fit(1, 1e-2)
    inner = lambda: getattr(learn.opt, 'opt', learn.opt).state
    body = list(learn.model[0].parameters())
    was = [inner()[p] for p in body]
    learn.model[1][0] = nn.Linear(8, 4)
    with learn.no_logging(): learn.fit(1, 1e-2)
    assert all(inner()[p] is s for p,s in zip(body, was))
    assert [int(inner()[p]['step']) for p in learn.model.parameters()] == [8]*2 + [4]*2

class SecondOptimizer(Callback):
    "Pulls the first layer towards zero, by an optimizer of its own whose learning rate falls"
    def __init__(self, make, event):
        self.make = make
        setattr(self, event, self.pull)
    def before_fit(self):
        if not hasattr(self, 'opt2'): self.opt2 = self.make(self.learn.model[0].parameters())
    def before_epoch(self):
        for g in self.opt2.param_groups: g['lr'] = 1e-2/(1+self.epoch)
    def pull(self):
        if not self.training: return
        self.opt2.zero_grad()
        sum((p**2).sum() for p in self.learn.model[0].parameters()).backward()
        self.opt2.step()

@pytest.mark.parametrize('event', ['after_step', 'after_batch'])
@pytest.mark.parametrize('make', [partial(torch.optim.Adam, lr=1e-2), partial(torch.optim.SGD, lr=1e-2, momentum=.9)], ids=['adam', 'sgd'])
def test_a_callback_may_step_an_optimizer_of_its_own(make, event):
    def run(xla=None): return two_fits(small(xla, opt=partial(SGD, mom=.9), cbs=[SecondOptimizer(make, event)]), lambda l: l.fit(2, 1e-2))
    assert_same(weights(run({})), weights(run()), 1e-4)

class FedInStep(Callback):
    "Keeps a fastai metric and feeds it within the step"
    def __init__(self, metric): self.metric,self.seen = metric,[]
    def before_epoch(self): self.metric.reset()
    def after_loss(self): self.metric.accumulate(self.learn)
    def after_epoch(self): self.seen.append(float(self.metric.value))

@pytest.mark.parametrize('metric', [AvgLoss, AvgSmoothLoss])
def test_a_refused_trace_leaves_no_sums_in_a_callbacks_metric(metric):
    def run(xla=None):
        learn = small(xla, cbs=[FedInStep(metric())])
        with learn.no_logging(): learn.fit(2, 1e-2)
        return learn.fed_in_step
    expected,got = run(),run({})
    assert got.metric.count == expected.metric.count
    assert_same([tensor(got.seen)], [tensor(expected.seen)])

class Raises(Callback):
    "Raises once, in a batch of the first epoch"
    order = 1
    def __init__(self, event, batch=0, training=True):
        self.batch,self.on_training,self.on = batch,training,True
        setattr(self, event, self.boom)
    def boom(self):
        if self.on and (self.iter,self.training) == (self.batch,self.on_training):
            self.on = False
            raise ZeroDivisionError('the first error')

class Heard(Callback):
    "fastai tells nobody of an error"
    def __init__(self): self.events = []
    def after_cancel_fit(self): self.events.append('after_cancel_fit')

def after_an_error(event, batch, training, xla=None):
    "Weights and values of a fit that follows one that has ended in an error"
    learn = small(xla, cbs=[Raises(event, batch, training), heard := Heard()])
    with learn.no_logging():
        with pytest.raises(ZeroDivisionError, match='the first error'): learn.fit(1, 1e-2)
        learn.fit(1, 1e-2)
    assert not heard.events
    return weights(learn),[tensor(learn.recorder.values)]

on_the_cpu = lru_cache(after_an_error)

@pytest.mark.parametrize('xla', [{}, dict(steps_per_execution=2), dict(replay=False)], ids=['recorded', 'grouped', 'retraced'])
@pytest.mark.parametrize('event,batch,training', [('after_loss', 0, True), ('before_batch', 3, True), ('after_pred', 1, False)])
def test_the_first_error_is_the_users_and_the_next_fit_goes_on(event, batch, training, xla):
    for got,want in zip(after_an_error(event, batch, training, xla), on_the_cpu(event, batch, training)): assert_same(got, want, 1e-4)

@pytest.mark.parametrize('xla', [{}, dict(replay=False)], ids=['recorded', 'retraced'])
def test_gradients_that_have_accumulated_before_an_error_are_there_in_the_next_fit(xla):
    def run(xla=None):
        learn = small(xla, cbs=[Raises('after_batch', 2), GradientAccumulation(1000)])
        with learn.no_logging(), learn.no_bar():
            with pytest.raises(ZeroDivisionError): learn.fit(1, 1e-2)
        return [p.grad.detach().cpu().clone() for p in learn.model.parameters()]
    expected = run()
    assert all(g.abs().sum() > 0 for g in expected)
    assert_same(run(xla), expected, 1e-4)

class Once(Callback):
    "Interrupts one step, and never again"
    done = False
    def after_backward(self):
        if self.training and self.train_iter == 3 and not self.done:
            self.done = True
            raise KeyboardInterrupt

@pytest.mark.parametrize('xla', [False, True], ids=['cpu', 'xla'])
def test_interrupt_by_a_callback_comes_once(xla):
    "What the callback has set before it raises outlives the trace of the step"
    learn = image_learner(cbs=Once()).remove_cb(ProgressCallback)
    if xla: learn.to_xla()
    with learn.no_logging():
        with pytest.raises(KeyboardInterrupt): learn.fit(1)
        learn.fit(1)
    assert learn.once.done and len(learn.recorder.losses) == len(learn.dls.train)

def test_a_second_thread_does_not_fit_at_the_same_time():
    "It ended in `Check failed: tensor_data`, in either of them"
    others = []
    class Starts(Callback):
        def after_batch(self):
            if others: return
            others.append(ThreadPoolExecutor(1).submit(small({}).fit, 1))
            others[0].exception()
    learn,plain = small({}, cbs=[Starts()]),small({})
    with learn.no_logging(), plain.no_logging(): learn.fit(2), plain.fit(2)
    with pytest.raises(RuntimeError, match='Fit one after the other'): others[0].result()
    assert_same(weights(learn), weights(plain))
    ThreadPoolExecutor(1).submit(learn.fit, 1).result()

failing = '''
from fastai.basics import *
from fastai_xla.all import *
from fastai_xla.lowerings.core import without_lowerings

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.register_buffer('least', torch.tensor(.3, dtype=torch.float64))
    def forward(self, x):
        y = self.l(x)
        return torch.where(y > 0, y, self.least).sum(1)

items = [(torch.randn(4), torch.zeros(())) for _ in range(64)]
dls = DataLoaders.from_dsets(items[:32], items[32:], bs=16, num_workers=0)
learn = Learner(dls, Net(), loss_func=MSELossFlat(), opt_func=SGD).to_xla(replay={replay})
learn.save('start')
with learn.no_bar(), learn.no_logging():
    with ExceptionExpected(RuntimeError, regex='incompatible size'), without_lowerings('types'): learn.fit(1)
    for f in (learn.model.l.weight.cpu, learn.model.cpu, partial(learn.save, 'end'), partial(learn.fit, 1)):
        with ExceptionExpected(RuntimeError, regex='is lost'): f()
    learn.load('start')
    learn.fit(1)
assert learn.model.l.weight.isfinite().all()
'''

@pytest.mark.parametrize('replay', [False, True])
def test_a_program_that_fails_does_not_end_the_process(replay, tmp_path):
    "What it was to update is lost, as where the memory of a device does not suffice; `load` brings weights"
    code = 'from fastcore.test import *\nimport warnings\nwarnings.simplefilter("ignore")' + failing.replace('{replay}', str(replay))
    res = own_process.run(['-c', code], tmp_path, tmp_path)
    assert not res.returncode, res.stderr
