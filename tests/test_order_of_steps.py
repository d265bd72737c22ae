"""What is drawn, read, changed and kept between steps comes in the order of fastai on the CPU

With several steps as one as with single ones; or the steps run one by one, with a warning"""
import pytest
from order_of_steps import *

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

@pytest.mark.parametrize('cls,name', [*((InDict, name) for name in does), (InList, 'step')])
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
    why = 'may store into a container' if cb is Nested else None
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

def test_windows_are_filled(): in_order(lambda: learner(model=partial(Pieces, filled_windows)), None)

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
