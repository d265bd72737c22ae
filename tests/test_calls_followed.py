"What code between two steps changes by calls that are not in its own text: batches are read in turn, and steps run one by one"
import sqlite3, tempfile, threading
from order_of_steps import *
from fastai_xla.makers import makers_of, reaches_items
import curriculum
from curriculum import Config, Steps

class Scaled(Items):
    "Items times a number that is looked up for each"
    def __init__(self, xy, by): self.xy,self.by = xy,by
    def __getitem__(self, i):
        x,y = self.xy[i]
        return x*self.by(),y
class Augmented(Items):
    def __getitem__(self, i):
        x,y = self.xy[i]
        return curriculum.augment(x),y
class Helped(Items):
    def __init__(self, xy): self.xy,self.steps = xy,Steps()
    def __getitem__(self, i):
        x,y = self.xy[i]
        return x*self.steps.now(),y

def of_items(cls, *args):
    curriculum.start()
    xy = items()
    return DataLoaders.from_dsets(cls(xy[:160], *args), cls(xy[160:], *args), bs=16, num_workers=0)

def by_module(): return curriculum.level
def by_class(): return Config.level
def by_cache(): return curriculum.ramp().level
def by_context(): return curriculum.in_context.get()

@patch
def advance_level(self:Learner): Config.level *= .9
class Curriculum(Callback):
    def push(self): Config.level *= .9
class Pushes(Callback):
    def after_batch(self):
        if self.training: self.curriculum.push()
class Held(Callback):
    def __init__(self, steps): self.steps = steps
    def after_batch(self):
        if self.training: self.steps.advance()

def imports(learn):
    from curriculum import advance
    advance()
def in_context(learn): curriculum.in_context.set(curriculum.in_context.get()*.9)
def sets_level(learn): Config.level *= .9
def sets_module(learn): curriculum.level = .9**learn.train_iter

class Advances(nn.Module):
    "A loss, or a layer, with a helper"
    def __init__(self): super().__init__(); self._steps = Steps()
    def forward(self, p, y=None):
        if self.training: self._steps.advance()
        return p if y is None else F.mse_loss(p, y)
_path = Path(tempfile.mkdtemp())/'level.txt'
def by_file(): return float(_path.read_text())
def writes(learn): _path.write_text(str(.9**learn.train_iter))
def of_file(*args):
    _path.write_text('1.')
    return of_items(Scaled, by_file)
def advancing(p, y):
    curriculum.advance()
    return F.mse_loss(p, y)

def after(f, *items): return lambda: learner(partial(of_items, *items), cbs=After(f))
cases = dict(
    function_of_a_module=after(lambda learn: curriculum.advance(), Scaled, by_module),
    in_what_items_call=after(sets_module, Augmented),
    imported_within=after(imports, Scaled, by_module),
    class_of_a_module=after(lambda learn: curriculum.Config.advance(), Scaled, by_class),
    by_computed_name=after(lambda learn: Config.assign(level=.9**learn.train_iter), Scaled, by_class),
    kept_by_a_cache=after(lambda learn: curriculum.ramp().advance(), Scaled, by_cache),
    variable_of_a_context=after(in_context, Scaled, by_context),
    file=lambda: learner(of_file, cbs=After(writes)),
    helper_of_items=after(sets_level, Helped),
    method_of_the_learner=after(lambda learn: learn.advance_level(), Scaled, by_class),
    helper=lambda: learner(partial(of_items, Scaled, by_class), cbs=Held(Steps())),
    other_callback=lambda: learner(partial(of_items, Scaled, by_class), cbs=[Curriculum(), Pushes()]),
    helper_of_the_loss=lambda: learner(partial(of_items, Scaled, by_class), loss_func=Advances()),
    loss=lambda: learner(partial(of_items, Scaled, by_module), loss_func=advancing),
    helper_of_a_layer=lambda: learner(partial(of_items, Scaled, by_class), model=lambda: nn.Sequential(nn.Linear(6, 1), Advances())))

@pytest.mark.parametrize('case', cases)
def test_items_are_read_in_turn(case):
    want,_ = left(cases[case])
    for to in (dict(replay='auto'), dict(steps_per_execution=3)):
        got,_ = left(cases[case], **to)
        for a,b in zip(*map(leaves, (want, got)), strict=True):
            torch.testing.assert_close(*map(torch.as_tensor, (b, a)), rtol=1e-3, atol=1e-4, check_dtype=False)

# What answers one thread alone

class Rows(Items):
    "Opened by the first item that is read"
    db = None
    def __getitem__(self, i):
        if self.db is None: self.open()
        x,y = self.xy[i]
        return x*self.db.execute('select by from t where i=?', (i%16,)).fetchone()[0],y
    def open(self):
        self.db = sqlite3.connect(':memory:')
        self.db.execute('create table t(i integer, by real)')
        self.db.executemany('insert into t values(?,?)', [(i, i/16) for i in range(16)])
class Opened(Rows):
    def __init__(self, xy):
        super().__init__(xy)
        self.open()
here = threading.local()
here.level = .5
def by_thread(): return getattr(here, 'level', 1.)

@pytest.mark.parametrize('args', [(Rows,), (Opened,), (Scaled, by_thread)], ids=['rows', 'opened', 'local'])
def test_what_answers_one_thread(args):
    in_order(lambda: learner(partial(of_items, *args)), '', n=1)

# Steps that are one program

@patch
def slow_down(self:Learner): curriculum.slow(self)
@patch
def weights_now(self:Learner): return [p.detach().clone() for p in self.model.parameters()]
class Slows(Learner):
    def slow(self): self.opt.set_hyper('lr', self.opt.hypers[-1]['lr']*.7)
class Weighs(Callback):
    def __init__(self): self.by = 1.
    def adjust(self): self.by *= .8
    def after_loss(self): self.learn.loss_grad = self.loss_grad*self.by
class Adjusts(Callback):
    def after_batch(self):
        if self.training: self.weighs.adjust()
class Keeps(Callback):
    def __init__(self, f): self.f,self.kept = f,[]
    def after_batch(self):
        if self.training: self.kept.append(self.f(self.learn))

def keeping(f):
    cb = Keeps(f)
    return learner(cbs=cb, see=lambda learn: cb.kept)
def slows():
    made,_ = learner()
    return Slows(made.dls, made.model, loss_func=made.loss_func, cbs=After(lambda learn: learn.slow())),lambda learn: []

steps = dict(function_of_a_module=lambda: learner(cbs=After(lambda learn: curriculum.slow(learn))),
    method_of_the_learner=lambda: learner(cbs=After(lambda learn: learn.slow_down())), subclass=slows,
    other_callback=lambda: learner(cbs=[Weighs(), Adjusts()]), weights=lambda: keeping(lambda learn: learn.weights_now()),
    gradients=lambda: keeping(lambda learn: curriculum.norms(learn.model)))

@pytest.mark.parametrize('case', steps)
def test_steps_run_one_by_one(case): in_order(steps[case], 'may look at the model or its optimizer', n=1)

def test_what_calls_change_nothing_else_is_read_ahead():
    class Counts(Callback):
        n = 0
        def count(self): self.n += 1
        def after_batch(self): self.learn.counts.count()
    learn = learner(partial(of_items, Scaled, by_class), cbs=Counts())[0].to_xla()
    learn.dl = learn.dls.train
    assert not reaches_items(learn, makers_of(learn.dl))
