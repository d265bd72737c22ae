"Methods and functions of libraries that users replace before a fit or between two: replayed as retraced, and as fastai on the CPU"
from contextlib import nullcontext
from functools import wraps
from unittest import mock
import fastai.layers, fastai.optimizer
import torch.nn.functional as F
from torch.nn.functional import conv1d
from by_log import *
from replacing import *

def ranged(): return nn.Sequential(mlp(), SigmoidRange(-3, 3))

@pytest.mark.parametrize('owner,name,model,mine', [
    (nn.Conv1d, '_conv_forward', conv, lambda k, self, x, w, b: conv1d(x, w*k, b, padding=1)),
    (fastai.layers, 'sigmoid_range', ranged, lambda k, x, low, high: torch.sigmoid(x)*(high-low)*k + low)])
def test_a_private_method_of_a_library_is_patched_before_the_fit(owner, name, model, mine, monkeypatch):
    """And once more before the next fit, which is that of another story: it is called once a batch, with the number of then

    That is the CPU's; the second story is not retraced once more"""
    for by in (.98, .97):
        calls = []
        def patched(*args):
            calls[0] += 1
            return mine(by**calls[0], *args)
        monkeypatch.setattr(owner, name, patched)
        def start():
            calls[:] = [0]
            return model()
        def story(): return dict(model=start, cbs=lambda: [Tick()], see=lambda l: list(calls))
        agree(story, tol=1e-6, refs=references(story) if by == .98 else (None, run(story, False, xla=False)[0]))
        assert calls == [36]   # of the last fit: 10 batches of training and 2 of validation, in 3 epochs

def test_it_is_patched_between_two_fits(monkeypatch):
    "The module was one call in the first"
    res = []
    for replay in (None, False, 'auto'):
        seed()
        learn = Learner(data(), conv(), loss_func=nn.MSELoss(), cbs=Tick())
        if replay is not None: learn.to_xla(replay=replay)
        n = [0]
        def patched(self, x, w, b):
            n[0] += 1
            return conv1d(x, w*.98**n[0], b, padding=1)
        with monkeypatch.context() as m, learn.no_bar(), learn.no_logging():
            learn.fit(1, 1e-2)
            m.setattr(nn.Conv1d, '_conv_forward', patched)
            learn.fit(1, 1e-2)
        res.append((list(map(float, learn.recorder.losses)), n, [host(p) for p in learn.model.parameters()]))
    for got,eps in ((res[1], 1e-6), (res[0], 1e-4)):
        test_close(res[2][0], got[0], eps=eps)
        assert res[2][1] == got[1]
        for a,b in zip(res[2][2], got[2]): test_close(a, b, eps=eps*20)

# --- methods of libraries' classes that a user has replaced before the fit, where all else is a library's

def counting(was, mine):
    "`mine` in the place of `was`; it counts in a list that only its defaults hold"
    def method(self, *args, seen=[]):
        seen += [0]
        return mine(was, len(seen), self, *args)
    return method

def often(n): return n%4 == 3 or n > 17
def grows(was, n, opt):
    for p,*_ in opt.all_params(with_grad=True): p.grad.mul_(1+often(n))
    was(opt)
def keeps_gradients(was, n, opt): return None if often(n) else was(opt)
def scales(was, n, f, *args): return was(f, *args)*(1+.1*often(n))
def leaves_out(was, n, met, learn): return None if often(n) else was(met, learn)
def doubles(was, n, cb):
    if often(n): cb.learn.loss_grad = cb.learn.loss_grad*2

replaced = [(Optimizer, 'step', grows), (Optimizer, 'zero_grad', keeps_gradients),
            (nn.Linear, 'forward', scales), (BaseLoss, '__call__', scales),
            (AvgMetric, 'accumulate', leaves_out), (TrainEvalCallback, 'after_loss', doubles)]

@pytest.mark.parametrize('cls,name,mine', replaced, ids=[f'{c.__name__}.{n}' for c,n,_ in replaced])
def test_a_method_of_a_library_is_patched_where_all_else_is_of_libraries(cls, name, mine, monkeypatch):
    was,made = getattr(cls, name, None),[]
    def story():
        made[:] = [counting(was, mine)]
        monkeypatch.setattr(cls, name, made[0], raising=False)
        return dict(model=mlp, loss_func=MSELossFlat, metrics=[mae], see=lambda l: [len(made[0].__kwdefaults__['seen'])])
    agree(story, branches=None, valid=None, tol=1e-6)

def adds_anew(met, learn):
    n = find_bs(learn.yb)
    met.total = met.total + learn.to_detach(met.func(learn.pred, *learn.yb))*n
    met.count += n

@pytest.mark.parametrize('replay', [False, 'auto'])
def test_a_sum_that_is_another_tensor_after_each_batch(replay, monkeypatch):
    monkeypatch.setattr(AvgMetric, 'accumulate', adds_anew)
    def story(): return dict(loss_func=MSELossFlat, metrics=[mae], see=lambda l: [v for r in l.recorder.values for v in r])
    (want,_),(got,_) = run(story, False, xla=False),run(story, replay)
    test_close(got['see'], want['see'], eps=1e-5)

def quieter(was, n, cb, event):
    res = was(cb, event)
    if event == 'after_loss' and isinstance(cb, Recorder) and often(n//40): cb.learn.loss_grad = cb.learn.loss_grad*.5
    return res
def longer(was, n, opt, *args, **kwargs): return was(opt, *args, **kwargs) if n%7 else []

@pytest.mark.parametrize('cls,name,mine', [(nn.Module, '__call__', lambda was, n, m, *xs: was(m, *xs)*(1+.1*(n%5 == 0))),
                                           (Callback, '__call__', quieter), (Optimizer, 'all_params', longer)])
def test_what_calls_modules_callbacks_and_parameters_is_patched(cls, name, mine, monkeypatch):
    was,made = getattr(cls, name),[]
    def story():
        seen = []
        def method(self, *args, **kwargs):
            seen.append(0)
            return mine(was, len(seen), self, *args, **kwargs)
        made[:] = [seen]
        monkeypatch.setattr(cls, name, method)
        return dict(model=mlp, loss_func=MSELossFlat, see=lambda l: [len(made[0])])
    try: agree(story, branches=None, valid=None, tol=1e-6, cpu=False)   # of callbacks there is one more on XLA
    finally: monkeypatch.undo()

@pytest.mark.parametrize('replay', [False, 'auto'])
def test_a_function_of_torchs_is_called_twice_by_fastais_losses(replay, monkeypatch):
    "Which make a tensor of fastai's, for which torch calls what stands in the function's place once more"
    was,n = F.mse_loss,[]
    def mine(*args, **kwargs):
        n.append(0)
        return was(*args, **kwargs)*(1+.01*len(n))
    monkeypatch.setattr(F, 'mse_loss', mine)
    def story(): return n.clear() or dict(loss_func=MSELossFlat, see=lambda l: [len(n)])
    (want,_),(got,learn) = run(story, False, xla=False),run(story, replay)
    assert got['see'] == want['see']
    test_close(got['losses'], want['losses'], eps=1e-4*max(want['losses']))
    if replay: assert any('calls it once more' in why for why in learn.xla_report().plain)

def test_a_mock_with_the_signature_of_a_forward(monkeypatch):
    was = nn.Linear.forward
    def fitted(replay, xla):
        with mock.patch.object(nn.Linear, 'forward', autospec=True, side_effect=lambda m, x: was(m, x)*.9):
            return run(lambda: dict(loss_func=MSELossFlat), replay, xla)[0]
    want,got = fitted(False, False),fitted('auto', True)
    test_close(got['losses'], want['losses'], eps=1e-4*max(want['losses']))

def spied(name, spy):
    "A learner of which a `Mock` is a part, in the place of what it calls"
    model,kwargs = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),{}
    if name == 'forward': model[0].forward = spy(model[0].forward)
    if name == 'stepper': kwargs['opt_func'] = partial(Optimizer, cbs=[spy(fastai.optimizer.sgd_step, defaults={})])
    if name == 'metric': kwargs['metrics'] = spy(mae, __name__='mae')
    return Learner(data(), model, loss_func=spy(F.mse_loss) if name == 'loss' else MSELossFlat(), **kwargs)

@pytest.mark.parametrize('name', ['forward', 'stepper', 'metric', 'loss', 'linear'])
def test_a_mock_counts_its_calls(name):
    def calls(to):
        seed()
        spies = []
        def spy(f, **kwargs):
            spies.append(mock.Mock(wraps=f))
            for k,v in kwargs.items(): setattr(spies[0], k, v)
            return spies[0]
        function = mock.patch.object(F, name, wraps=getattr(F, name)) if name == 'linear' else nullcontext()
        with function as m, warnings.catch_warnings():
            warnings.simplefilter('ignore')
            learn = spied(name, spy)
            if to is not None: learn.to_xla(**to)
            with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
        return (m or spies[0]).call_count,[float(l) for l in learn.recorder.losses]
    want,losses = calls(None)
    for to in (dict(), dict(steps_per_execution=3)):
        got,theirs = calls(to)
        assert got == want > 3, to
        test_close(theirs, losses, eps=1e-4*max(losses))

def test_a_function_stands_in_the_place_of_the_batch_transforms():
    def story():
        dls = data()
        for dl in dls.loaders: dl.after_batch = lambda b: (b[0]*.5, *b[1:])
        return dict(dls=lambda: dls, loss_func=MSELossFlat)
    (want,_),(got,_) = run(story, False, xla=False),run(story, 'auto')
    test_close(got['losses'], want['losses'], eps=1e-4*max(want['losses']))

# --- functions of libraries that are replaced between two fits, and settings that a schedule changes

@pytest.mark.parametrize('o,name', [(torch.autograd, 'backward'), (fastai.optimizer, 'debias'),
                                    (AvgMetric, 'accumulate'), (AvgSmoothLoss, 'accumulate')])
def test_a_spy_comes_between_two_fits(o, name, monkeypatch):
    def calls(replay):
        seed()
        learn,n,was = Learner(data(), mlp(), loss_func=MSELossFlat(), metrics=mae),[],getattr(o, name)
        if replay is not None: learn.to_xla(replay=replay)
        def spy(*args, seen=n, **kwargs):
            seen += [0]
            return was(*args, **kwargs)
        with monkeypatch.context() as m, learn.no_bar(), learn.no_logging():
            learn.fit(1, 1e-2)
            m.setattr(o, name, spy)
            learn.fit(1, 1e-2)
        return len(n),[float(l) for l in learn.recorder.losses]
    (want,losses),(got,theirs) = calls(None),calls('auto')
    assert got == want
    test_close(theirs, losses, eps=1e-4*max(losses))

def another_loss(learn): learn.loss_func = L1LossFlat()
def frozen(learn): learn.model[0].requires_grad_(False)
@torch.no_grad()
def moved(learn): learn.model[2].bias.add_(.1)

@pytest.mark.parametrize('change', [another_loss, frozen, moved])
def test_a_schedule_of_the_users_changes_the_learner(change):
    def fitted(replay):
        seed()
        learn,n = Learner(data(), mlp(), loss_func=MSELossFlat()),[]
        if replay is not None: learn.to_xla(replay=replay)
        def lr(pct):
            n.append(pct)
            if len(n) == 8: change(learn)
            return 1e-2
        with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=ParamScheduler(dict(lr=lr)))
        return [float(l) for l in learn.recorder.losses],[host(p) for p in learn.model.parameters()]
    (losses,ps),(got,qs) = fitted(None),fitted('auto')
    test_close(got, losses, eps=1e-4*max(losses))
    for p,q in zip(ps, qs): test_close(p, q, eps=1e-4)

# --- functions of torch's, one of which calls what stands in its place

class Acts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(6, 16),nn.Linear(16, 1)
    def forward(self, x): return self.b(torch.cat(F.relu(F.softsign(self.a(x))).split(8, 1)[::-1], 1))

def acts(): return nn.Sequential(nn.Linear(6, 16), nn.Softsign(), nn.ReLU(), nn.Linear(16, 1))

def bare(f): return lambda g: g
places = [(F, 'softsign', Acts), (F, 'relu', acts), (F, 'mse_loss', acts), (torch.Tensor, 'split', Acts),
          (torch, 'relu', acts), (torch, 'load', acts)]

@pytest.mark.parametrize('o,name,model,wrap', [*((*p, wraps) for p in places), (F, 'relu', acts, bare), (torch, 'relu', acts, bare)])
def test_a_function_of_torchs_is_wrapped(o, name, model, wrap, monkeypatch):
    "It runs once a call, with another number each time; nothing is retraced but what runs within a call of torch's"
    f,calls = getattr(o, name),[0]
    @wrap(f)
    def wrapped(*args, **kwargs):
        calls[0] += 1
        res = f(*args, **kwargs)
        return [t*.98**calls[0] for t in res] if name == 'split' else res*.98**calls[0]
    monkeypatch.setattr(o, name, wrapped)
    def start():
        calls[0] = 0
        return model()
    learn = same(lambda: dict(model=start, cbs=lambda: [Tick()]))
    inside = o is torch and name == 'relu'
    assert bool(learn.xla_report().plain) == inside and (learn.xla_opt.replay.by_log is None) == inside
