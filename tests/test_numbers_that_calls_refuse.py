"""Numbers that a call does not take, as a lower bound above the upper one

A program is compiled, and audited, with other numbers than a step's. A call that refuses them must not end the fit"""
from contextlib import nullcontext
from by_log import *
from fastai_xla.capture.program import Program, decides
from fastai_xla.lowerings.all import without_lowerings

class Noisy(nn.Module):
    def __init__(self, lo, hi):
        super().__init__()
        self.m,self.lo,self.hi = mlp(),lo,hi
    def forward(self, x): return self.m(x*torch.empty_like(x).uniform_(self.lo, self.hi))

@pytest.mark.parametrize('lo,hi', [(-.1, .1), (1., 1.001), (0., .05), (.3, .3)])
def test_bounds_that_are_close(lo, hi):
    "Drawn on the device, so that the CPU draws others. Audits come often in a fit of many short epochs"
    learn = same(lambda: dict(model=partial(Noisy, lo, hi)), cpu=False, n=4)
    assert counts(learn)[True]['refused'] == 0 and not learn.xla_report().plain

class Wider(Callback):
    "Bounds that move are inputs of the program: it is not compiled again"
    def before_batch(self):
        self.learn.model.lo = .9 - .01*self.iter
        self.learn.model.hi = .91 + .02*self.iter

def test_bounds_that_move():
    learn = same(lambda: dict(model=partial(Noisy, .9, .91), cbs=lambda: [Wider()]), cpu=False, n=4)
    assert counts(learn)[True]['traced'] <= 1 and not any(name.endswith('uniform_') for name,*_ in decides)

class Known(torch.autograd.Function):
    "Takes some numbers only"
    @staticmethod
    def forward(ctx, x, b):
        ctx.by = {.25: 2., .5: 3.}[b]
        return x*ctx.by
    @staticmethod
    def backward(ctx, g): return g*ctx.by,None

class Applies(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = mlp()
    def forward(self, x): return Known.apply(self.m(x), .25)*.7 + .1

def test_an_autograd_function_that_takes_some_numbers_only():
    learn = same(lambda: dict(model=Applies), 1e-6, n=4)
    assert not learn.xla_report().plain and counts(learn)[True]['refused'] == 0

def test_what_decides_is_found_by_halves(monkeypatch):
    "One number of many: a trace or two for each half, and the others stay inputs"
    class Many(Applies):
        def forward(self, x):
            x = self.m(x)
            for i in range(10): x = ((x*(.5 + i/20) + .3).clamp(-9. - i, 9. + i)
                - .01*i)
            return x/10 + F.hardtanh(x, -.5, .5)**2.
    seen,found = [],Program._found
    def _found(self, calls, rng, true, only=None):
        seen.append(only)
        return found(self, calls, rng, true, only)
    monkeypatch.setattr(Program, '_found', _found)
    was = set(decides)
    learn = same(lambda: dict(model=Many), cpu=False)
    new = {name for name,*_ in decides - was}
    assert len(new) == 1 and 'pow' in new.pop(), decides - was
    assert counts(learn)[True]['replayed'] > 20 and 3 < len(seen) < 15, seen

class Celu(nn.Module):
    "torch_xla's `celu` hides its number from the hash of a graph, by which programs are found"
    def __init__(self, *alphas):
        super().__init__()
        self.m,self.alphas,self.last = mlp(8),alphas,nn.Linear(8, 1)
    def forward(self, x):
        x = self.m(x)
        return self.last(sum(F.celu(x, a) for a in self.alphas))

class Steeper(Callback):
    def before_batch(self): self.learn.model.alphas = (.3 + .2*self.iter,)

@pytest.mark.parametrize('alphas,cbs', [((1.3,), list), ((1.3, .4), list), ((1.,), lambda: [Steeper()])], ids='one two moving'.split())
def test_a_number_that_the_hash_of_a_graph_does_not_see(alphas, cbs):
    learn = same(lambda: dict(model=partial(Celu, *alphas), cbs=cbs), 1e-5)
    assert not learn.xla_report().plain

@pytest.mark.parametrize('name', ['celu', None])
def test_a_program_is_not_that_of_another_number(name):
    "Also where torch_xla's own kernel is in place: a number that makes another graph of the same hash decides"
    class Own(Celu):
        def forward(self, x): return self.last(torch.ops.aten.celu(self.m(x), 2.7))
    with without_lowerings('celu') if name else nullcontext():
        with torch.no_grad():
            for a in (.4, 2.7): F.celu(torch.randn(16, 8).to(device()), a).cpu()
        learn = same(lambda: dict(model=Own), 1e-5, cpu=not name)
    assert counts(learn)[True]['replayed'] > 20

class Signs(nn.Module):
    "0 and -0, and a number that is none, by turns"
    def __init__(self, *numbers):
        super().__init__()
        self.m,self.numbers,self.n = mlp(),numbers,0
    def forward(self, x):
        self.n += 1
        s = torch.full((1,), self.numbers[self.n % 2], device=x.device)
        return self.m(x) + torch.atan2(s, s.new_full((1,), -1.)).nan_to_num(.5)

@pytest.mark.parametrize('numbers', [(0., -0.), (1., math.nan)], ids='zeros nan'.split())
def test_numbers_that_are_equal_or_not_but_for_python(numbers, recwarn):
    learn = same(lambda: dict(model=partial(Signs, *numbers)), 1e-6)
    assert not learn.xla_report().plain and not [w for w in recwarn if 'audit' in str(w.message)]
