"""What is drawn, read, changed and kept between steps comes in the order of fastai on the CPU

With several steps as one as with single ones; or the steps run one by one, with a warning"""
import pytest
from collections import deque
from test_several_unseen import *

class Items:
    "Items that depend on a number, a list and an array, and on what is drawn"
    def __init__(self, xy, noise=None): self.xy,self.noise,self.d,self.w,self.ws = xy,noise,1.,[1.],np.ones(3)
    def __len__(self): return len(self.xy)
    def __getitem__(self, i):
        x,y = self.xy[i]
        x = x*self.d*self.w[0]*self.ws[0].item()
        return x*(1+self.noise()) if self.noise else x,y
    def set_difficulty(self, d): self.d = d

def of_torch(): return torch.rand(1).item()
draws = dict(random=random.random, numpy=np.random.rand, torch=of_torch)

def loaders(draw=None, **kwargs):
    xy = items()
    return DataLoaders.from_dsets(Items(xy[:160], draw), Items(xy[160:], draw), bs=16, num_workers=0, **kwargs)

def left(make, n=2, **to):
    "What a fit of `make()` leaves, on the CPU without `to`, and why steps have been run one by one"
    for seed in (torch.manual_seed, np.random.seed, random.seed, manual_seed): seed(3)
    learn,see = make()
    if to: learn.to_xla(**to)
    with warnings.catch_warnings(record=True) as told, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(n, 1e-2)
    told = [str(w.message) for w in told]
    assert not [s for s in told if 'read ahead' in s], told
    return ([float(o) for o in learn.recorder.losses], list(host(learn.model.state_dict()).values()), host(see(learn)),
            draw_next()), [s for s in told if 'run one by one' in s]

def draw_next(): return random.random(),float(np.random.rand()),float(torch.rand(1))

def in_order(make, why, k=3, n=2, cpu=True):
    "The same losses, weights, draws and what is seen on the CPU, by single steps and by `k` as one; these one by one for the reason `why`"
    (one,_),(several,told) = left(make, n, steps_per_execution=1),left(make, n, steps_per_execution=k)
    host = left(make, n)[0] if cpu else several
    for a,b,c in zip(*map(leaves, (host, one, several)), strict=True):
        torch.testing.assert_close(*map(torch.as_tensor, (c, b)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(*map(torch.as_tensor, (c, a)), rtol=1e-3, atol=1e-4, check_dtype=False)
    assert len(told) == bool(why) and (why or '') in ''.join(told), told

def learner(dls=data, loss_func=F.mse_loss, see=lambda learn: [], model=None, **kwargs):
    m = model() if model else nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return Learner(dls(), m, loss_func=loss_func, **kwargs),see

class After(Callback):
    "After each batch of training"
    def __init__(self, f): self.f = f
    def after_batch(self):
        if self.training: self.f(self.learn)

# --- items that a callback changes

def by(learn): return .9**learn.train_iter
def an_attribute(learn): learn.dls.train_ds.d = by(learn)
def a_list(learn): learn.dls.train_ds.w[0] = by(learn)
def in_an_array(learn): learn.dls.train_ds.ws *= .9
def by_a_method(learn): learn.dls.train_ds.set_difficulty(by(learn))
def by_its_name(learn): getattr(learn.dls, 'train_' + 'ds').set_difficulty(by(learn))

class Curriculum:
    def __init__(self): self.schedules = dict(a=lambda learn: by_a_method(learn))
    def __call__(self, learn): self.schedules['a'](learn)

@pytest.mark.parametrize('f', [an_attribute, a_list, in_an_array, by_a_method, by_its_name, Curriculum()])
def test_a_callback_changes_items(f):
    in_order(lambda: learner(loaders, cbs=After(f)), 'may look at the items of its DataLoader, or change them')

# --- draws of items and of others from one stream

class Sees(Callback):
    def __init__(self, draw): self.draw,self.seen = draw,[]
    def after_batch(self): self.seen.append(self.draw())

@pytest.mark.parametrize('name', draws)
def test_items_and_a_callback_draw_by_turns(name):
    def make(): return learner(partial(loaders, draws[name]), cbs=Sees(draws[name]), see=lambda l: l.sees.seen)
    in_order(make, 'draw random numbers after each of them')

def collated(b): return torch.stack([x for x,_ in b])*(1+random.random()),torch.stack([y for _,y in b])
def collating():
    dls = data()
    for dl in dls.loaders: dl.create_batch = collated
    return dls

def test_collating_and_a_callback_draw_by_turns():
    in_order(lambda: learner(collating, cbs=After(lambda learn: random.random())), 'After')

def test_steps_that_run_one_by_one_have_nothing_read_ahead():
    "For another reason: the callback sets what the next step depends on"
    def jitter(learn): learn.opt.set_hyper('lr', 1e-2*(1+random.random()))
    in_order(lambda: learner(partial(loaders, random.random), cbs=After(jitter)), 'may look at the model or its optimizer')

def test_items_and_mixup_draw_by_turns():
    in_order(lambda: learner(partial(loaders, of_torch), cbs=MixUp()), 'its steps or callbacks draw random numbers')

@pytest.mark.parametrize('make', [lambda: learner(partial(loaders, of_torch)),   # fastai counts inputs by an item more, which draws
                                  lambda: learner(partial(loaders, random.random), cbs=MixUp()),   # from another stream
                                  lambda: learner(loaders, cbs=Sees(random.random), see=lambda l: l.sees.seen)],
                         ids=['items', 'mixup', 'callback'])
def test_who_draws_alone_does_not_ask_for_single_steps(make): in_order(make, None)

def test_executions_where_items_draw():
    "The first batch of training is alone, as is that of validation, which has two; then three are one"
    learn,_ = learner(partial(loaders, random.random))
    learn.to_xla(steps_per_execution=3)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-2)
        with count_xla() as c: learn.fit(2, 1e-2)
    assert c.executions == (1 + 3 + 2) + (3 + 1 + 2)

# --- what a callback does after a batch by functions and objects that stand in dicts and lists

class InDict(Callback):
    "Calls a function that it finds in a dict"
    def __init__(self, f): self.fs,self.seen = dict(a=lambda learn: f(learn, self.seen)),[]
    def after_batch(self):
        if self.training: self.fs['a'](self.learn)
class Does:
    def __init__(self, f): self.f = f
    def go(self, learn, seen): self.f(learn, seen)
class InList(InDict):
    "Calls a method of an object in one"
    def __init__(self, f): self.fs,self.seen = dict(a=[Does(f)]),[]
    def after_batch(self):
        if self.training: self.fs['a'][0].go(self.learn, self.seen)

def validates(learn, seen):
    if learn.iter == 4: seen.append([float(o) for o in learn.validate()])
def replaces_step(learn, seen):
    if learn.train_iter != 4: return
    was = learn.opt.step
    learn.opt.step = lambda: was() if learn.train_iter % 2 else None
def seeds(learn, seen): torch.manual_seed(learn.train_iter)

def dropping(): return nn.Sequential(nn.Linear(6, 8), nn.Dropout(.5), nn.Linear(8, 1))
does = dict(validates=(validates, "may look at the recorder's metrics", None),
            step=(replaces_step, 'may look at the model or its optimizer', None), seeds=(seeds, 'may seed random numbers', dropping))

@pytest.mark.parametrize('name', does)
@pytest.mark.parametrize('cls', [InDict, InList])
def test_a_function_in_a_container_runs_after_each_batch(cls, name):
    f,why,model = does[name]
    def make(): return learner(cbs=cls(f), model=model, see=lambda l: first(l.cbs, risinstance(InDict)).seen)
    in_order(make, why, cpu=not model)   # dropout is of each device

class Seeds(Callback):
    "By a function of a library's, which an attribute holds"
    f = None
    def before_fit(self): self.f = manual_seed
    def after_batch(self):
        if self.training: self.f(self.train_iter)

def test_a_callback_holds_what_seeds():
    in_order(lambda: learner(cbs=Seeds(), model=dropping), 'may seed random numbers', cpu=False)

class Hidden(Callback):
    "By what an iterator gives, in which nobody can look"
    def before_fit(self): self.fs = iter([lambda: self.learn.validate()])
    def after_batch(self):
        if self.training and self.iter == 4: next(self.fs, noop)()

def test_what_is_seen_too_late_is_told():
    "And the steps that had been run with that batch are as the program has left them"
    told = left(lambda: learner(cbs=Hidden()), steps_per_execution=3)[1]
    assert len(told) == 1 and 'a callback has run batches after a batch, which those that had been run with it could not see' in told[0]

# --- lists and dicts that a step fills

class Fills(Callback):
    "A dict, under a name that only this line says"
    def before_fit(self): self.box,self.seen = {},[]
    def after_loss(self): self.box['loss'] = self.learn.loss.detach()
    def after_batch(self): self.seen.append(self.box['loss'])
class FillsList(Fills):
    "That somebody else holds"
    all = [0.]
    def before_fit(self): self.box,self.seen = FillsList.all,[]
    def after_loss(self): self.box[0] = self.learn.loss.detach()
    def after_batch(self): self.seen.append(FillsList.all[0])
class Nested(Fills):
    def before_fit(self): self.box,self.seen = {'a': [0.]},[]
    def after_loss(self): self.box['a'][0] = self.learn.loss.detach()
    def after_batch(self): self.seen.append(self.box['a'][0])
class Replaces(Fills):
    def after_loss(self): self.box = [self.learn.loss.detach()]
    def after_batch(self): self.seen.append(self.box)

@pytest.mark.parametrize('cb', [Fills, FillsList, Nested, Replaces])
def test_a_step_leaves_results_in_a_container(cb):
    why = 'stores into a container' if cb is Nested else None
    in_order(lambda: learner(cbs=cb(), see=lambda l: first(l.cbs, risinstance(Fills)).seen), why)

# --- tensors that a step changes in place

class InPlace(Callback):
    "A sum that goes on from step to step, looked at after some of them"
    def before_fit(self): self.bank,self.seen = torch.zeros(3, 2).to(self.dls.device),[]
    def after_pred(self): self.bank.mul_(.5).add_(self.learn.pred.detach().mean())
    def after_batch(self):
        if self.iter%2: self.seen.append(self.bank.clone())
class InPlaceRow(InPlace):
    def after_pred(self): self.bank[1].mul_(.5).add_(self.learn.pred.detach().mean())
class InPlaceView(InPlace):
    def before_fit(self):
        super().before_fit()
        self.rows = self.bank.unbind()
    def after_pred(self): self.rows[2].mul_(.5).add_(self.learn.pred.detach().mean())
class InPlaceLater(InPlace):
    "Not in the first step of those that run as one"
    def after_pred(self):
        if self.learn.iter%3 == 2: super().after_pred()
class InPlaceNested(InPlace):
    def before_fit(self):
        super().before_fit()
        self.box = [{'bank': self.bank}]
    def after_batch(self): self.seen.append(self.box[0]['bank'].clone())
class InPlaceUnseen(InPlace):
    "Looked at after the fit"
    def after_batch(self): self.seen.append(self.learn.loss)
    def after_fit(self): self.seen.append(self.bank.clone())

_changed = 'a tensor that they change in place'

@pytest.mark.parametrize('cb,why', [(InPlace, _changed), (InPlaceRow, _changed), (InPlaceView, _changed), (InPlaceNested, _changed),
                                    (InPlaceLater, _changed), (InPlaceUnseen, None)])
def test_a_step_changes_a_tensor_in_place(cb, why):
    in_order(lambda: learner(cbs=cb(), see=lambda l: first(l.cbs, risinstance(InPlace)).seen), why)

# --- windows that overlap

class Pieces(nn.Module):
    "Of what comes out of a layer, in each of which something changes in place"
    def __init__(self, how): super().__init__(); self.how,self.l = how,nn.Linear(6, 6)
    def forward(self, x):
        y = self.l(x)
        with torch.no_grad(): self.how(y.detach())
        return y.mean(1, keepdim=True)

def filled_windows(y): y.unfold(1, 4, 2)[:,1].fill_(.5)

@pytest.mark.parametrize('k', [1, 3])
def test_windows_are_filled(k): in_order(lambda: learner(model=partial(Pieces, filled_windows)), None, k=k)

@pytest.mark.parametrize('how', [lambda y: y.unfold(1, 4, 2)[:,1].add_(1), lambda y: y.unfold(1, 4, 2).mul_(2),
                                 lambda y: torch.as_strided(y, (4, 4), (2, 1))[1].add_(1)])
def test_overlapping_windows_are_not_changed_in_place(how):
    "XLA cannot tell which of the places of a number has changed"
    def make(): return learner(model=partial(Pieces, how))
    with pytest.raises(RuntimeError, match='a number shows in several places'): left(make, steps_per_execution=1)

def test_windows_have_their_gradient():
    class Windows(Pieces):
        def forward(self, x): return self.l(x).unfold(1, 4, 1).square().mean((1, 2))[:,None]
    in_order(lambda: learner(model=partial(Windows, None)), None)

# --- what a callback changes after a batch, and its own events or hooks of the next step read

class Counts(Callback):
    "A factor of predictions"
    def before_fit(self): self.k,self.handles = 0,self.hooks()
    def hooks(self): return []
    def by(self): return 1-.03*self.k
    def after_batch(self): self.k += self.training
    def after_fit(self): [h.remove() for h in self.handles]
class OwnEvent(Counts):
    def after_pred(self): self.learn.pred = self.pred*self.by()
class SetsBefore(OwnEvent):
    def before_batch(self): self.factor = self.by()
    def after_pred(self): self.learn.pred = self.pred*self.factor
class OfParameters(Counts):
    def hooks(self): return [p.register_hook(lambda g: g*(1-.03*self.k)) for p in self.model.parameters()]
class Forward(Counts):
    def hooks(self): return [self.model[0].register_forward_hook(self.hook)]
    def hook(self, m, x, y): return y*self.by()
class Backward(Counts):
    def hooks(self): return [self.model[1].register_full_backward_hook(lambda m, g, _: (g[0]*(1-.03*self.k),))]
class OfFastai(Forward):
    def hooks(self): return [Hook(self.model[0], self.hook, detach=False)]
    def hook(self, m, x, y): return y*self.by()
class OfStep(Counts):
    "Before torch's"
    def hooks(self): return [self.opt.opt.register_step_pre_hook(self.hook)]
    def hook(self, opt, *args):
        for p in self.model.parameters(): p.grad.mul_(self.by())
class Factor:
    def __init__(self): self.n = 0
    def up(self): self.n += 1
    def by(self): return 1-.03*self.n
class ByObject(Counts):
    def before_fit(self): self.factor,self.handles = Factor(),[]
    def after_pred(self): self.learn.pred = self.pred*self.factor.by()
    def after_batch(self):
        if self.training: self.factor.up()
class ByList(Counts):
    def before_fit(self): self.factors,self.handles = [1.],[]
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad*self.factors[-1]
    def after_batch(self): self.factors.append(1-.03*self.train_iter)
class ReadsAfter(Counts):
    "The other way round"
    def before_fit(self): self.outs,self.handles = [],[]
    def after_pred(self): self.out = self.pred.mean().detach()
    def after_batch(self): self.outs.append(self.out)

class Halves(Callback):
    def after_pred(self): self.learn.pred = self.pred*.5
class TurnsOff(Halves):
    def after_batch(self): self.run = self.train_iter < 4
class TurnsOffTraining(Halves):
    def after_batch(self): self.run_train = self.train_iter%2 == 0
class Leaves(Halves):
    def after_batch(self):
        if self.train_iter == 4: self.learn.remove_cb(self)
class Comes(Callback):
    def after_batch(self):
        if self.train_iter == 4: self.learn.add_cb(Halves())

_own_state = 'change what the next one depends on'

@pytest.mark.parametrize('cb', [OwnEvent, OfParameters, Forward, Backward, OfFastai, ByObject, ByList, TurnsOff, TurnsOffTraining,
                                Leaves, Comes])
def test_a_callback_counts_for_its_own_events_and_hooks(cb): in_order(lambda: learner(cbs=cb()), _own_state)
def test_a_callback_counts_for_a_hook_of_a_step():
    in_order(lambda: learner(cbs=OfStep(), opt_func=partial(OptimWrapper, opt=torch.optim.SGD)), _own_state)

def test_a_callback_sets_before_a_batch_what_it_counts_after(): in_order(lambda: learner(cbs=SetsBefore()), 'looks at each batch')
def test_a_callback_only_reads_what_a_step_has_left():
    in_order(lambda: learner(cbs=ReadsAfter(), see=lambda l: first(l.cbs, risinstance(Counts)).outs), None)

# --- what a callback changes after a batch, and code that a step reaches in other ways reads

class Factors: k = 0
def factor(): return 1-.03*Factors.k
class CountsThere(Callback):
    def before_fit(self): Factors.k = 0
    def after_batch(self): Factors.k += self.training
class Scaled(nn.Module):
    "By a property, which its `forward` names"
    def __init__(self, held=None): super().__init__(); self.l,self.held = nn.Linear(6, 1),held
    @property
    def scale(self): return 1-.03*Factors.k
    def forward(self, x): return self.l(x)*self.scale
class ScalesByHeld(Scaled):
    def forward(self, x): return self.l(x)*self.held.by()
class CallsHeld(Scaled):
    def forward(self, x): return self.held(self.l(x))
class ByFactors:
    def by(self): return factor()
    def __call__(self, x): return x*factor()
class ReversesGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, g): return -g*factor()
class Reverses(Scaled):
    def forward(self, x): return ReversesGradients.apply(self.l(x))
def stepper(p, lr, **kwargs): p.data.add_(p.grad.data, alpha=-lr*factor())
class Descends(torch.optim.Optimizer):
    def __init__(self, params, lr=.1): super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g['params']: p.add_(p.grad, alpha=-g['lr']*factor())

ways = dict(property=dict(model=Scaled), method=dict(model=partial(ScalesByHeld, ByFactors())),
    object=dict(model=partial(CallsHeld, ByFactors())),
    autograd_function=dict(model=Reverses), stepper=dict(opt_func=partial(Optimizer, cbs=[stepper])),
    optimizer=dict(opt_func=partial(OptimWrapper, opt=Descends)))

@pytest.mark.parametrize('way', ways)
def test_a_callback_counts_for_code_that_a_step_reaches(way): in_order(lambda: learner(cbs=CountsThere(), **ways[way]), _own_state)

class CountsHidden(CountsThere):
    "By what an iterator gives, in which nobody can look"
    def before_fit(self):
        super().before_fit()
        self.fs = iter([super().after_batch]*99)
    def after_batch(self): next(self.fs)()

def test_what_a_step_reads_and_is_changed_too_late_is_told():
    told = left(lambda: learner(cbs=CountsHidden(), model=Scaled), steps_per_execution=3)[1]
    assert len(told) == 1 and 'a callback has changed Factors.k, which the step reads, after a batch, which those' in told[0], told

# --- what a callback changes after a batch, and a step holds under another name

def weighed(p, y, w): return F.mse_loss(p, y)*float(w[-1])
class Weighed:
    def __init__(self, temps): self.temps = temps
    def __call__(self, p, y): return weighed(p, y, self.temps)
class WeighedNet(nn.Module):
    def __init__(self, temps):
        super().__init__()
        self.net,self.temps = nn.Linear(6, 1),temps
    def forward(self, x): return self.net(x)*self.temps[-1]

by_partial = lambda w: dict(loss_func=partial(weighed, w=w))
by_object = lambda w: dict(loss_func=Weighed(w))
by_model = lambda w: dict(model=lambda: WeighedNet(w))
by_closure = lambda w: dict(loss_func=lambda p, y: weighed(p, y, w))

class Lowers(Callback):
    def __init__(self, own, f): self.own,self.f = own,f
    def after_batch(self):
        if self.training: self.f(self.own)
class Steps(Lowers):
    def after_batch(self):
        if self.training: next(self.own)

def lowers(w): w[0] *= .95
def appends(w): w.append(w[-1]*.95)
def multiplies(w): np.multiply(w, .95, out=w)
def lowering(w):
    while True: yield lowers(w)

@pytest.mark.parametrize('uses', [by_partial, by_object, by_model, by_closure], ids=['partial', 'object', 'model', 'closure'])
@pytest.mark.parametrize('start,f', [(lambda: [1.], lowers), (lambda: deque([1.], 5), appends), (lambda: np.ones(1), multiplies),
                                     (lambda: [1.], lowering)], ids=['list', 'deque', 'array', 'generator'])
def test_a_callback_changes_what_a_step_holds(uses, start, f):
    def make():
        w = start()
        return learner(**uses(w), cbs=Steps(f(w), None) if f is lowering else Lowers(w, f))
    in_order(make, 'change what the next one depends on')

class Stops(Callback):
    def __init__(self, e): self.e = e
    def after_batch(self):
        if self.training and self.train_iter == 5: raise self.e('enough')

@pytest.mark.parametrize('e', [KeyboardInterrupt, RuntimeError])
def test_a_callback_ends_the_fit_by_an_exception(e):
    "Steps after it are not done"
    sds = []
    for k in (None, 1, 3):
        for seed in (torch.manual_seed, np.random.seed, random.seed): seed(3)
        learn,_ = learner(cbs=Stops(e))
        if k: learn.to_xla(steps_per_execution=k)
        with learn.no_bar(), learn.no_logging(), pytest.raises(e), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            learn.fit(1, 1e-2)
        sds.append(list(host(learn.model.state_dict()).values()))
    for a,b,c in zip(*sds): torch.testing.assert_close(c, b), torch.testing.assert_close(c, a, rtol=1e-3, atol=1e-4)

def test_a_list_that_only_callbacks_hold_does_not_ask_for_single_steps():
    def make():
        seen = []
        return learner(cbs=[Lowers(seen, lambda w: w.append(1)), Sees(lambda: len(seen))], see=lambda l: l.sees.seen)
    in_order(make, None, cpu=False)

# --- methods of a learner of the user's

class DoesMore(Learner):
    n = 0
    def _do_one_batch(self):
        self.n += 1
        super()._do_one_batch()
        if self.training and self.n%3 == 0:
            with torch.no_grad():
                for p in self.model.parameters(): p.mul_(1-.001*self.n)
class SplitsOtherwise(Learner):
    n = 0
    def _split(self, b):
        super()._split(b)
        self.n += 1
        self.xb = self.xb[0]*(1+.01*self.n),

@pytest.mark.parametrize('cls', [DoesMore, SplitsOtherwise])
def test_a_learner_of_the_users_does_its_batches(cls):
    def make():
        m = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        return cls(data(), m, loss_func=F.mse_loss),lambda learn: [learn.n]
    in_order(make, "runs in the place of fastai's")
