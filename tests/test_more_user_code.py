"More code as the public writes it: replayed as retraced, and as fastai on the CPU"
import cProfile, pstats, warnings
from by_log import *
from test_kinds_of_code import hooked

# how steps are replayed, and whether a callback has an `after_loss` too: it does nothing, but with it they are logged
plain_runs = (None, False),(False, False),('auto', False)
all_runs = *plain_runs,('auto', True)
def logged(yes): return dict(after_loss=lambda cb: None) if yes else {}

def heard(events, fits=(2,), runs=plain_runs, model=mlp, **kwargs):
    "What the recorder has heard in fits with such a callback, on the CPU, retraced and replayed; the last learner"
    res = []
    for replay,in_log in runs:
        torch.manual_seed(0)
        random.seed(0)
        manual_seed(3)
        learn = Learner(data(), model(), loss_func=nn.MSELoss(), metrics=mse, **kwargs)
        if replay is not None: learn.to_xla(replay=replay)
        rows = []
        for n in fits:
            with learn.no_bar(), learn.no_logging(): learn.fit(n, 1e-2, cbs=type('Cb', (Callback,), events | logged(in_log)))
            rows.append([*map(float, learn.recorder.losses), *(float(v) for vs in learn.recorder.values for v in vs)])
        res.append(rows)
    return res,learn

def louder(cb): cb.learn.loss.data.mul_(2)
def louder_elsewhere(cb): twice(cb.learn.loss)
def twice(t): t.mul_(2)
def replaced(cb): cb.learn.loss = cb.learn.loss*2
def cut_off(cb): cb.pred.detach().clamp_(-1, 1)

@pytest.mark.parametrize('f', [louder, replaced, cut_off])
def test_what_metrics_are_computed_of_is_changed_before_the_recorder_looks(f):
    "From the first batch on, and without a warning"
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*changes `learn.pred`')
        (cpu,plain,*replayed),_ = heard(dict(after_batch=f), runs=all_runs)
    for r in replayed:
        test_close(plain[0], r[0], eps=1e-5)
        test_close(cpu[0], r[0], eps=1e-4)

def test_such_a_change_that_only_the_tensor_tells_of():
    with pytest.warns(UserWarning, match='changes `learn.pred`'):
        (_,plain,replayed),_ = heard(dict(after_batch=louder_elsewhere), fits=(1, 1))
    test_close(plain[1], replayed[1], eps=1e-5)   # the first batch of the first fit is without it, as the warning says

def after_lr_find(replay, model, draws=True, due=None):
    "Losses of a fit after an `lr_find` that diverges, and the random state of the host"
    for seed in (torch.manual_seed, np.random.seed, random.seed, manual_seed): seed(3)
    def after_loss(cb): cb.n = random.random() + np.random.rand()
    learn = Learner(data(), model(), loss_func=nn.MSELoss(), cbs=type('Cb', (Callback,), dict(after_loss=after_loss))() if draws else [])
    if replay is not None: learn.to_xla(replay=replay)
    with pytest.MonkeyPatch.context() as m, learn.no_bar(), learn.no_logging():
        if due is not None: m.setattr('fastai_xla.transfer.Look.due', lambda self: due)
        learn.lr_find(num_it=60, end_lr=1e4, show_plot=False)
        n = len(learn.recorder.losses)
        learn.fit(1, 1e-2)
    return n,list(map(float, learn.recorder.losses)),(random.random(), np.random.rand(), torch.rand(1).item())

@pytest.mark.parametrize('draws', [False, True])
def test_after_an_lr_find_that_diverges_all_draws_are_as_on_the_cpu(draws):
    n,losses,state = after_lr_find(None, mlp, draws)
    for replay in (False, 'auto'):
        n2,losses2,state2 = after_lr_find(replay, mlp, draws)
        assert (n2, state2) == (n, state)
        test_close(losses2, losses, eps=1e-4)

def test_after_an_lr_find_the_devices_draws_do_not_depend_on_when_its_losses_are_read():
    def model(): return nn.Sequential(nn.Linear(6, 16), nn.Dropout(), nn.Linear(16, 1))
    for draws in (False, True):
        want = after_lr_find(False, model, draws, due=False)
        for replay,due in ((False, True), ('auto', False), ('auto', True)): assert after_lr_find(replay, model, draws, due) == want

def test_states_of_cells_in_a_list():
    "Two traces of one step may find constants of theirs, such as indices, at one address, one after the other"
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.r,self.f = nn.GRUCell(3, 8),nn.Linear(8, 1)
        def forward(self, x):
            hs = [torch.zeros(len(x), 8, device=x.device)]
            for t in x.view(len(x), 2, 3).unbind(1): hs.append(self.r(t, hs[-1]))
            self.hs = torch.stack(hs[1:]).detach().unbind(0)
            return self.f(hs[-1])
    agree(lambda: dict(model=Cells, see=lambda l: list(l.model.hs)), tol=1e-6)

# --- numbers that C code takes, in steps that are recorded

def decided(by, one_cycle=False):
    "What a fit leaves whose loss is weighted so: retraced, and recorded, four steps as one and what is left of an epoch one by one"
    def after_loss(cb): cb.learn.loss_grad = cb.loss_grad*by(cb)
    res = []
    for kw in (dict(replay=False), dict(steps_per_execution=4)):
        for seed in (torch.manual_seed, random.seed, manual_seed): seed(0)
        cb = type('Cb', (Callback,), dict(after_loss=after_loss))()
        learn = Learner(data(), mlp(), loss_func=nn.MSELoss(), cbs=cb).to_xla(**kw)
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(2, 1e-2) if one_cycle else learn.fit(3, 1e-2)
        res.append(list(map(float, learn.recorder.losses)))
    test_close(*res, eps=1e-5)
    assert not [why for why in learn.xla_opt.replay.reasons.why if 'audit' in why]

bys = dict(epoch=lambda cb: 2. if math.isclose(cb.epoch, 1) else 1., iteration=lambda cb: 2. if math.isclose(cb.train_iter, 9) else 1.,
           floor=lambda cb: 1. + math.floor(cb.pct_train*4), items=lambda cb: [1., .5, .1][cb.epoch])

@pytest.mark.parametrize('by', bys)
def test_numbers_that_c_code_takes(by, recorded): decided(bys[by])

def test_a_learning_rate_that_is_near(recorded):
    decided(lambda cb: 2. if math.isclose(cb.opt.hypers[0]['lr'], 1e-2, rel_tol=.05) else 1., one_cycle=True)

class Sets(Callback):
    "What a metric may read, set before the recorder looks"
    order = 10
    def before_fit(self): self.by = 0.
    def after_batch(self):
        self.by = float(self.iter+1)
        self.learn.loss_func.part = self.loss.detach()*self.by

def reads_callback(p, t): return (p-t).mean()*0 + reads_callback.learn.sets.by
def reads_batch_number(p, t): return (p-t).mean()*0 + reads_batch_number.learn.train_iter

metrics = dict(callback=reads_callback, batch_number=reads_batch_number, loss=lambda: LossMetric('part'))

@pytest.mark.parametrize('metric', metrics.values(), ids=metrics)
def test_a_metric_reads_what_is_set_after_the_batch(metric):
    res = []
    for replay,in_log in all_runs:
        torch.manual_seed(0)
        random.seed(0)
        learn = Learner(data(), mlp(), loss_func=MSELossFlat(), cbs=[Sets()] if metric is not reads_batch_number or in_log else [])
        learn.metrics = [metric() if metric.__name__ == '<lambda>' else metric]
        metric.learn,learn.recorder.train_metrics = learn,True
        if replay is not None: learn.to_xla(replay=replay)
        cbs = [type('Cb', (Callback,), logged(True))()]*in_log
        with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2, cbs=cbs)
        res.append([[float(v) for v in vs[1::2]] for vs in learn.recorder.values])
    for r in res[1:]: test_close(r, res[0], eps=1e-4)

def test_only_a_metric_that_may_read_it_is_computed_after_the_step():
    learn = Learner(data(), mlp(), loss_func=MSELossFlat(), metrics=[mse, lambda p,t: (p-t).abs().max()], cbs=Sets()).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
    assert not any('metrics' in why for why in learn.xla_report().beside)

def reads_smooth_loss(cb): return cb.learn.recorder.smooth_loss.value
def reads_the_metrics(cb): return first(cb.learn.metrics).value

@pytest.mark.parametrize('read', [reads_smooth_loss, reads_the_metrics])
def test_what_the_recorder_has_so_far_is_read_before_it_looks(read):
    res = []
    for replay,in_log in all_runs:
        torch.manual_seed(0)
        random.seed(0)
        seen = []
        def after_batch(cb):
            v = read(cb)
            seen.append(0. if v is None else float(v))
            if cb.training and seen[-1] > 0: cb.opt.set_hyper('lr', .01*seen[-1])
        learn = Learner(data(), mlp(), loss_func=MSELossFlat(), metrics=mse)
        learn.recorder.train_metrics = True
        if replay is not None: learn.to_xla(replay=replay)
        cb = type('Cb', (Callback,), dict(after_batch=after_batch) | logged(in_log))()
        with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2, cbs=cb)
        res.append([v for v in seen if v == v])   # the first is a NaN of fastai's
    assert len(set(res[0])) > 20
    for r in res[1:]: test_close(r, res[0], eps=1e-4)

def reads_a_weight(cb): cb.read = cb.model[0].weight.detach().cpu()

def test_a_weight_read_after_its_step():
    "Its graph may have the hash of another one, and is computed apart then: not in place, as others of the step still need what it was"
    (cpu,plain,replayed),_ = heard(dict(after_step=reads_a_weight), fits=(2,))
    test_close(plain[0], replayed[0], eps=1e-6)
    test_close(cpu[0], replayed[0], eps=1e-4)

def test_what_is_read_before_the_rest_of_its_step():
    m,n,w = (torch.rand(4, 4) for _ in range(3))
    ts = [t.to(device()) for t in (m, n, w)]
    sync()
    for o in (0, 1):
        (m,n,w),before = ts,ts[2]@ts[2]
        old = w.cpu()
        w.add_(m@n@ts[o])
        w.cpu()
        test_close(before.cpu(), old@old, eps=1e-5)
        sync()

@pytest.mark.parametrize('replay', [None, False, 'auto'])
def test_a_weight_that_is_replaced_is_trained_by_none(replay):
    "As on the CPU, where the optimizer goes on with the old one"
    def after_batch(cb):
        if cb.training and cb.train_iter == 3: cb.model[0].weight = nn.Parameter(cb.model[0].weight.detach().clone())
    def after_epoch(cb): cb.learn.seen.append(float(cb.model[0].weight.detach().sum()))
    torch.manual_seed(0)
    learn = Learner(data(), mlp(), loss_func=MSELossFlat())
    if replay is not None: learn.to_xla(replay=replay)
    learn.seen = []
    cb = type('Cb', (Callback,), dict(after_batch=after_batch, after_epoch=after_epoch))()
    with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2, cbs=cb)
    assert len(set(learn.seen)) == 1

def test_the_forward_of_a_librarys_class_is_replaced(without_audits):
    def before_batch(cb):
        if cb.training and cb.epoch and cb.iter == 4: cb.learn.patch(nn.ReLU, 'forward', lambda self, x: F.silu(x))
    res = []
    for replay,in_log in all_runs:
        torch.manual_seed(0)
        random.seed(0)
        learn = Learner(data(), nn.Sequential(mlp(), nn.Tanh()), loss_func=MSELossFlat())
        if replay is not None: learn.to_xla(replay=replay)
        with pytest.MonkeyPatch.context() as m, learn.no_bar(), learn.no_logging():
            learn.patch = m.setattr
            learn.fit(3, 1e-2, cbs=type('Cb', (Callback,), dict(before_batch=before_batch) | logged(in_log))())
        res.append([*map(float, learn.recorder.losses)])
    cpu,plain,*replayed = res
    for r in replayed:
        test_close(r, plain, eps=1e-6)
        test_close(r, cpu, eps=1e-4)

class Weighed(Learner): weights = np.array([.2, .5])
class Shifted(nn.Linear):
    value = torch.tensor([1., 2.])
    def forward(self, x): return super().forward(x)*self.value.to(x.device).sum()

def test_arrays_and_tensors_in_attributes_of_classes():
    "Their truth is an error"
    learn = Weighed(data(), nn.Sequential(Shifted(6, 1)), loss_func=nn.MSELoss()).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)

class DrawsBackward(torch.autograd.Function):
    "As Shake-Shake (https://arxiv.org/abs/1705.07485)"
    @staticmethod
    def forward(ctx, a, b): return .5*a + .5*b
    @staticmethod
    def backward(ctx, g):
        r = np.random.rand()
        return r*g,(1-r)*g

class DrawsForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.r = random.random()
        return ctx.r*a + (1-ctx.r)*b
    @staticmethod
    def backward(ctx, g): return ctx.r*g,(1-ctx.r)*g

class DrawsTensors(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b): return a + b
    @staticmethod
    def backward(ctx, g): return g*torch.rand(len(g), 1).to(g.device),g

class Shaken(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.a,self.b,self.c,self.f = nn.Linear(6, 8),nn.Linear(6, 8),nn.Linear(8, 1),f
    def forward(self, x): return self.c(self.f.apply(self.a(x), self.b(x)))*(1 + np.random.rand())   # after those of the function

@pytest.mark.parametrize('f,line', [(DrawsBackward, 'backward'), (DrawsForward, 'DrawsForward.apply'), (DrawsTensors, 'backward')])
def test_what_an_autograd_function_draws_on_the_host(f, line):
    "Once a step, as on the CPU, and in the same order"
    draws = []
    class Notes(Callback):
        def after_fit(self): draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    (cpu,plain,replayed),learn = heard({}, model=lambda: np.random.seed(3) or Shaken(f), cbs=Notes())
    assert replayed == plain
    test_close(cpu[0], replayed[0], eps=1e-4)
    assert draws[0] == draws[1] == draws[2]
    assert re.search(rf'{line} at .*, line \d+ draws random numbers on the host', str(learn.xla_report().plain))

# --- a profiler, as of `%prun`, which Python tells of calls as it tells us

def test_a_fit_is_profiled():
    "Up to Python 3.11 it was an error: a profiler in C is no function that can be put back"
    def own(p, t): return F.mse_loss(p, t)
    def losses(run):
        torch.manual_seed(0)
        random.seed(0)   # which shuffles
        learn = Learner(data(), mlp(), loss_func=own).to_xla()
        with learn.no_bar(), learn.no_logging(): run(learn.fit, 2, 1e-2)
        return list(map(float, learn.recorder.losses))
    profile = cProfile.Profile()
    assert losses(profile.runcall) == losses(lambda f, *args: f(*args))
    names = {name for _,_,name in pstats.Stats(profile).stats}
    assert 'own' in names and sys.getprofile() is None
