"Code that a log seems to end at, and that is replayed all the same, with the numbers of the CPU"
from by_log import *
from test_kinds_of_code import Net, hooked
from own_functions import counting, function

followed = {}
def follows(f):
    followed[f.__name__] = f
    return f

@follows
def a_function_that_branches_on_a_float():
    def backward(ctx, g): return (g*3 if ctx.by > .5 else g*ctx.by), None
    return counting(function(backward), lambda m, n: .1*(n%10))

@follows
def class_methods_that_name_each_other():
    "Of an autograd function, as entmax has them"
    class Scaled(torch.autograd.Function):
        @classmethod
        def _by(cls, x, by): return x*by
        @classmethod
        def forward(cls, ctx, x, by):
            ctx.by = by
            return cls._by(x, by)
        @classmethod
        def backward(cls, ctx, g): return cls._by(g, ctx.by),None
    return counting(Scaled, lambda m, n: .1*(n%10))

@follows
def a_margin_that_grows():
    def loss(p, y, n=[0]):
        n[0] += 1
        return F.mse_loss(p, y) + F.margin_ranking_loss(p, p.roll(1, 0), y.sign(), margin=.01*n[0])
    return dict(loss_func=lambda: partial(loss, n=[0]))

@follows
def most_batches_are_passed_over():
    def before_batch(cb):
        if cb.training and cb.iter%8 > 1: raise CancelBatchException
    def after_pred(cb): cb.learn.pred = cb.pred*1.
    return hooked(before_batch=before_batch, after_pred=after_pred)

@follows
def a_penalty_at_times():
    def after_loss(cb):
        if not cb.training or cb.train_iter%4: return
        x = cb.x.detach().requires_grad_()
        g, = torch.autograd.grad(cb.model(x).sum(), x, create_graph=True)
        cb.learn.loss_grad = cb.loss_grad + g.pow(2).sum(1).mean()
    return hooked(after_loss=after_loss)

@follows
def what_is_asked_twice_is_the_same():
    "After another branch the results so far are real, and the user's code holds what it was given before"
    def after_backward(cb):
        p = cb.model[0].weight
        g = p.grad
        if cb.train_iter%4 == 3: g.mul_(2)
        if p.grad is not g: p.grad = g*100
    return hooked(after_backward=after_backward)

def sequence(weights, n=6):
    "Layers of a library whose weights a user's code has computed; after `n` steps they are given something else"
    def f(m, x):
        if m.training: m.n = getattr(m, 'n', 0) + 1
        return weights(m, x.flip(1) if getattr(m, 'n', 0) > n else x)
    return dict(model=lambda: Net(f, more=nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))))

@follows
def layers_whose_weight_is_set():
    def weights(m, x):
        if not hasattr(m, 'raw'):
            m.raw = nn.Parameter(m.more[0].weight.data.clone())
            del m.more[0]._parameters['weight']
        m.more[0].weight = m.raw*2
        return m.more(x)
    def model():
        m = sequence(weights)['model']()
        m(torch.zeros(1, 6))
        return m
    return dict(model=model)

@follows
def a_teacher_of_the_same_weights():
    def weights(m, x):
        with torch.no_grad(): teacher = torch.func.functional_call(m.more, {n: p*.9 for n,p in m.more.named_parameters()}, (x,))
        return m.b(x) + .3*teacher
    return sequence(weights)

@follows
def layers_of_a_hypernetwork():
    return sequence(lambda m, x: torch.func.functional_call(m.more, {n: p*(1+x.mean()) for n,p in m.more.named_parameters()}, (x,)))

@follows
def a_mean_of_what_the_last_step_has_left():
    "torch_xla remembers the dtype of what a traced step has made, and the graph of a mean is another one then"
    def after_pred(cb):
        if cb.training and hasattr(cb, 'last'): cb.learn.pred = cb.pred + .1*cb.last.mean()
        cb.last = cb.pred.detach()
    return hooked(after_pred=after_pred)

@follows
def a_part_of_a_sequence_of_layers():
    "A slice is a new module at each step"
    return dict(model=lambda: Net(lambda m, x: m.b(m.more[:2](x)), more=nn.Sequential(nn.ReLU(), nn.Linear(16, 16), nn.ReLU())))

@follows
def rows_of_a_list():
    def after_pred(cb):
        i = random.sample(range(16), 4)
        if cb.training: cb.learn.pred,cb.learn.yb = cb.pred[i],(cb.y[i],)
    return hooked(after_pred=after_pred)

@follows
def a_compiled_loss():
    loss = torch.compile(lambda p, y: (p-y).abs().mean() + F.mse_loss(p, y), backend='eager')
    def after_pred(cb): cb.learn.pred = cb.pred*(1+cb.train_iter/100)
    return hooked(after_pred=after_pred) | dict(loss_func=lambda: loss)

n_traced = dict(a_function_that_branches_on_a_float=10, class_methods_that_name_each_other=1, a_margin_that_grows=1,
                most_batches_are_passed_over=1, a_penalty_at_times=3,
                what_is_asked_twice_is_the_same=2, layers_whose_weight_is_set=2, a_teacher_of_the_same_weights=2,
                layers_of_a_hypernetwork=2, a_mean_of_what_the_last_step_has_left=2,
                a_part_of_a_sequence_of_layers=1, rows_of_a_list=1, a_compiled_loss=1)

@pytest.mark.parametrize('name,traced', n_traced.items())
def test_replayed(name, traced):
    learn = agree(followed[name], branches=None, tol=1e-6, n=2)
    assert counts(learn)[True]['traced'] == traced and not counts(learn)[True]['refused']

def test_a_default_device_within_a_step_is_no_call_of_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.n = mlp(),0
        def forward(self, x):
            self.n += 1
            with torch.device(x.device): return self.body(x)*torch.full((1,), 1/(1+.05*self.n)) + torch.tensor([.01*self.n])
    learn = agree(lambda: dict(model=Net), branches=None, n=2)
    assert not learn.xla_report().plain and counts(learn)[True]['replayed'] > 12
