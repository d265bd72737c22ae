"Several steps as one, beside code that acts between them or is not seen at first: as fastai on the CPU, and as retraced"
import ctypes
from as_one import *
from array import array   # in the place of fastai's

# --- objects that a callback holds or names

class SetsLR:
    n = 0
    def step(self, learn):
        self.n += 1
        learn.opt.set_hyper('lr', .02/(1 + self.n))
class Shrinks:
    "Holds the learner"
    def __init__(self, learn): self.l = learn
    def step(self, learn):
        with torch.no_grad():
            for p in self.l.model.parameters(): p.mul_(.97)
class Passes:
    "Hands it on, when it is called"
    def __init__(self): self.others = [SetsLR()]
    def __call__(self, learn): self.others[0].step(learn)
class Notes:
    def __init__(self): self.losses = []
    def step(self, learn): self.losses.append(learn.loss.detach())
named = SetsLR()

class Holder(Callback):
    def __init__(self, make): self.make = make
    def before_fit(self): self.s = self.make(self.learn)
    def after_batch(self):
        if self.training: self.s.step(self.learn)
class Calls(Holder):
    def after_batch(self):
        if self.training: self.s(self.learn)
class Names(Callback):
    def before_fit(self): named.n = 0
    def after_batch(self):
        if self.training: named.step(self.learn)

@pytest.mark.parametrize('make', [partial(Holder, lambda l: SetsLR()), partial(Holder, Shrinks), partial(Calls, lambda l: Passes()), Names],
                         ids=['argument', 'attribute', 'two', 'global'])
def test_an_object_of_a_callback_changes_the_step(make):
    agrees(lambda: (dict(cbs=make()), lambda l: l.opt.hypers[0]['lr']), 'may look at the model or its optimizer')

def test_an_object_of_a_callback_that_changes_nothing_of_it():
    agrees(lambda: (dict(cbs=Holder(lambda l: Notes())), lambda l: l.holder.s.losses), None)

# --- `after_batch` that ends what is to come, looks at metrics, or predicts

class Stops(Callback):
    "Early, by its own rule"
    def __init__(self, exc=CancelFitException, at=4): self.exc,self.at = exc,at
    def after_batch(self):
        if self.training and self.iter == self.at: raise self.exc
class StopsByLoss(Callback):
    def after_batch(self):
        if self.training and self.loss.item() < 4.: self.stop()
    def stop(self): raise CancelFitException
class Patience:
    def see(self, n):
        if n == 4: raise CancelEpochException()
class StopsByObject(Callback):
    order = 60   # the recorder has heard of the batch
    def before_fit(self): self.p = Patience()
    def after_batch(self):
        if self.training: self.p.see(self.iter)
class OwnTerminate(TerminateOnNaNCallback):
    def after_batch(self):
        if self.iter == 3 and self.training: raise CancelTrainException()

ends = dict(fit=Stops, train=partial(Stops, CancelTrainException), epoch=partial(Stops, CancelEpochException()), loss=StopsByLoss,
            object=StopsByObject, short=partial(ShortEpochCallback, .5, short_valid=False), subclass=OwnTerminate)

@pytest.mark.parametrize('name', ends)
def test_after_batch_ends_what_is_to_come(name):
    def steps(l): return [l.opt.state[p]['step'] for p in l.model.parameters()]
    agrees(lambda: (dict(cbs=ends[name]()), steps), 'may end the batch, the epoch or the fit', k=4)

def test_an_lr_find_goes_on_with_several_steps_as_one():
    learn = fitted(lambda: (dict(cbs=TerminateOnNaNCallback()), noop), n=1, steps_per_execution=4)[1]
    with warnings.catch_warnings(), learn.no_bar(), learn.no_logging():
        warnings.filterwarnings('error', message='.*run one by one')
        learn.lr_find(num_it=20, show_plot=False)

class Smooth(Callback):
    order = 60
    def before_fit(self): self.seen = []
    def after_batch(self):
        if self.training: self.seen.append([float(self.recorder.smooth_loss.value), float(self.recorder.losses[-1])])
class Average(Smooth):
    def after_batch(self):
        if not self.training: self.seen.append(float(self.recorder.loss.value))
class Validates(Smooth):
    def after_batch(self):
        if self.training and self.iter == 4: self.seen.append([float(o) for o in self.learn.validate()])

@pytest.mark.parametrize('cb', [Smooth, Average, Validates])
def test_after_batch_looks_at_metrics(cb):
    agrees(lambda: (dict(cbs=cb()), lambda l: first(l.cbs, risinstance(Smooth)).seen), "may look at the recorder's metrics", k=2)

# --- tensors that a step moves from one place to another

class Shifts(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        for n in ('p1', 'p2', 'p3'): self.register_buffer(n, torch.zeros(16, 1))
    def forward(self, x):
        o = self.m(x) + .1*self.p1 - .05*self.p3
        p = self.p1
        self.p1,self.p2,self.p3 = o.detach(),p,self.p2
        return o
class Swaps(Shifts):
    def forward(self, x):
        self.p1,self.p2 = self.p2 + .1,self.p1
        return self.m(x)*(1 + self.p1)
class Keeps(Shifts):
    "In a tuple"
    h = None
    def forward(self, x):
        if self.h is None: self.h = torch.zeros_like(x[:,:1]),torch.zeros_like(x[:,:1])
        o = self.m(x) + .1*self.h[0] - .05*self.h[1]
        self.h = o.detach(),self.h[0]
        return o

@pytest.mark.parametrize('model', [Shifts, Swaps, Keeps])
def test_a_step_moves_tensors_from_place_to_place(model):
    "As one, where of ten batches one is left over, and singly"
    def see(l): return l.model.h if model is Keeps else []
    def story(): return dict(model=model()),see
    def left(l): return [float(o) for o in l.recorder.losses],host(l.model.state_dict()),host(see(l))
    several,single = agrees(story, None, n=3),fitted(story, 3, steps_per_execution=1)[1]
    for a,b in zip(*map(leaves, map(left, (several, single))), strict=True):
        torch.testing.assert_close(*map(torch.as_tensor, (b, a)), rtol=1e-5, atol=1e-6)

# --- state of the user's

class Fills(Callback):
    "Has `make()` changed by `f` within each step"
    def __init__(self, make, f): self.b,self.f = make(),f
    def after_pred(self):
        if self.training: self.f(self.b, self.train_iter % 256)
def adds(b, i): b.append(i)
def counts_up(b, i): b[0] += 1
def puts(b, i): b[i % len(b)] = i

@pytest.mark.parametrize('make,f', [(bytearray, adds), (partial(bytearray, 4), puts), (lambda: memoryview(bytearray(4)), counts_up),
                                    (lambda: array('i', [0, 0]), counts_up), (lambda: (ctypes.c_int*2)(), counts_up)])
def test_bytes_that_a_step_changes(make, f):
    "They had been changed by each trace"
    def story():
        cb = Fills(make, f)
        return dict(cbs=cb),lambda learn: [list(cb.b)]
    b = make()
    agrees(story, 'changes a bytearray' if f is adds else 'another scope (b)' if isinstance(b, (bytearray, array)) else 'self.b')

class Snapshots(Callback):
    "Takes something of the weights before some of the steps"
    def __init__(self, take): self.take,self.seen = take,[]
    def before_batch(self):
        if self.training and self.train_iter in (7, 12): self.seen.append(self.take([p.detach() for p in self.model.parameters()]))

@pytest.mark.parametrize('take', [lambda ps: [p.clone() for p in ps], lambda ps: [torch.stack([p.norm() for p in ps]).sum()]])
def test_what_is_taken_of_the_weights_before_a_step(take):
    "It ended the fit: the program of the step took over the weights' memory before it was computed"
    def story():
        cb = Snapshots(take)
        return dict(cbs=cb),lambda learn: cb.seen
    agrees(story, 'looks at each batch')

# --- layers that are left out of some steps

class Sometimes(nn.Module):
    "Its second layer is in the third step first: with the seed 3 numpy draws .55, .71, .29"
    def __init__(self):
        super().__init__()
        self.ls = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)])
    def forward(self, x):
        x = self.ls[0](x).tanh()
        if not self.training or np.random.rand() < .5: x = x + self.ls[1](x).tanh()
        return self.ls[2](x)

def steps_of(learn): return [learn.opt.state[p].get('step', 0) for p in learn.model.parameters()]

def test_a_layer_without_a_gradient_waits_for_its_first():
    "That steps have been tried as one, and could not, is no gradient of zeros"
    agrees(lambda: (dict(model=Sometimes(), opt_func=Adam), steps_of), 'draws random numbers on the host')

# --- what a hook of fastai's keeps

class Activations(Callback):
    def __init__(self, hook): self.hook,self.seen = hook,[]
    def after_batch(self): self.seen.append(L(self.hook.stored)[0].mean().item())

@pytest.mark.parametrize('hooked', [lambda m: hook_output(m[0]), lambda m: hook_outputs([m[0]])], ids='one several'.split())
def test_after_batch_looks_at_a_hook_of_fastai(hooked):
    def story():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        cb = Activations(hooked(model))
        return dict(model=model, cbs=cb),lambda learn: cb.seen
    agrees(story, 'Activations may look at')

class Weighs(nn.Module):
    "A loss with a weight that somebody sets"
    def __init__(self):
        super().__init__()
        self.w = torch.tensor(1.)
    def forward(self, p, t): return F.mse_loss(p, t)*self.w

made = dict(of_the_device=lambda cb, v: torch.tensor(v, device=cb.x.device), of_the_host=lambda cb, v: torch.tensor(v),
            full=lambda cb, v: torch.full((), v, device=cb.x.device), sent=lambda cb, v: torch.tensor(v).to(cb.x.device))
def to_loss(cb, t): cb.learn.loss_func.w = t
def to_callback(cb, t): cb.w = t

@pytest.mark.parametrize('how,place,event', [
    ('of_the_device', to_loss, 'after_step'), ('of_the_host', to_callback, 'after_step'), ('full', to_loss, 'after_step'),
    ('sent', to_callback, 'after_step'), ('of_the_device', to_callback, 'before_backward')])
def test_a_number_is_put_into_a_tensor_for_the_next_step(how, place, event):
    "It is no number of the next step, and none of the program's results"
    def story():
        def put(cb):
            if cb.training: place(cb, made[how](cb, 1+cb.pct_train))
        def after_loss(cb):
            if place is to_callback and cb.training: cb.learn.loss_grad = cb.loss_grad*cb.w
        def before_fit(cb): cb.w = torch.tensor(1.)
        cb = type('Puts', (Callback,), {event: put, 'after_loss': after_loss, 'before_fit': before_fit})()
        return dict(loss_func=Weighs(), cbs=cb, opt_func=SGD), lambda l: [float(l.loss_func.w), float(cb.w)]
    agrees(story, 'is set from the host within the step')

# --- what stores, and changes nothing

def test_parts_of_a_loss_in_a_dict_of_its_own():
    mse,mae = nn.MSELoss(),nn.L1Loss()
    def loss(p, t):
        parts = {}
        parts['mse'] = mse(p, t)
        parts['mae'] = mae(p, t)
        return sum(parts.values())
    agrees(lambda: (dict(loss_func=loss), lambda l: 0), '')

def test_the_container_is_named():
    "Of the variables of other scopes"
    mse,seen = nn.MSELoss(),{}
    def loss(p, t):
        seen['n'] = len(p)
        return mse(p, t)
    agrees(lambda: (dict(loss_func=loss), lambda l: dict(seen)), 'may store into a container of another scope (seen)')

def test_a_number_of_numpy_that_is_set_once():
    class Chooses(Callback):
        k = None
        def before_fit(self): self.k = None
        def after_loss(self):
            if self.k is None: self.k = np.argmax([0, 1])
            self.learn.loss_grad = self.loss_grad*(1 + self.k)
    agrees(lambda: (dict(cbs=Chooses()), lambda l: l.chooses.k), '', n=3)

class Weighted(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w
    def forward(self, p, t): return F.mse_loss(p, t)*self.w

def test_a_module_that_is_made_within_the_step(): agrees(lambda: (dict(loss_func=lambda p,t: Weighted(.5)(p, t)), lambda l: 0), '')

# --- what was refused without need, or ended the process

class Attends(nn.Module):
    "As of the annotated transformer: `self` is a variable of the comprehension, and an argument"
    def __init__(self):
        super().__init__()
        self.layers,self.by,self.attn = nn.ModuleList([nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)]),2.,torch.zeros(16, 16)
    def forward(self, x):
        q,k = [l(x)/self.by for l in self.layers]
        self.attn = (q @ k.T).softmax(-1)
        return (self.attn @ x).sum(-1, keepdim=True)

def test_an_attribute_of_an_argument_that_a_comprehension_takes(): agrees(lambda: (dict(model=Attends()), lambda l: 0), None)

class Scales(Callback):
    "As many notebooks have it: the scaler notes in a dict of its own that it has stepped"
    order = 10
    param_groups = property(lambda self: self.opt.param_groups)
    def before_fit(self): self.scaler,self.scales = torch.amp.GradScaler('cuda'),[]
    def step(self, *args, **kwargs): self.skipped = False
    def before_backward(self): self.learn.loss_grad = self.scaler.scale(self.loss_grad)
    def before_step(self):
        self.skipped = True
        self.scaler.step(self)
        self.scales.append(self.scaler.get_scale())
        if self.skipped: raise CancelStepException()
    def after_step(self): self.scaler.update()

def test_a_scaler_of_gradients_that_reads():
    cb = Scales()
    agrees(lambda: (dict(cbs=cb), lambda l: cb.scales), 'a `GradScaler` of Scales reads')
