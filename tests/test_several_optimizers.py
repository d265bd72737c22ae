"Several steps as one with optimizers of the user's, which keep numbers and tensors in places of their own"
from as_one import *
from fastai_xla.capture import recording
from fastai_xla.capture.calls_told import TorchCalls

class Counts(torch.optim.Optimizer):
    "The number of the step in the group, as timm's Adan has it"
    def __init__(self, ps, lr=1e-2): super().__init__(ps, dict(lr=lr, k=0))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            g['k'] += 1
            for p in g['params']: p.add_(p.grad, alpha=-g['lr']*min(1, g['k']/10))
class Decays(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for g in self.param_groups: g['weight_decay'] = g['weight_decay']*1.2 + 1e-3

def with_opt(opt, k): return lambda: (dict(opt_func=partial(OptimWrapper, opt=opt)), lambda l: [g[k] for g in l.opt.opt.param_groups])

class Averages(torch.optim.Optimizer):
    "Keeps state as timm's Lion does"
    def __init__(self, ps, lr=1e-2): super().__init__(ps, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g['params']:
                st = self.state[p]
                if not st: st['avg'] = torch.zeros_like(p)
                st['avg'].mul_(.9).add_(p.grad)
                p.add_(st['avg'], alpha=-g['lr'])

class Looks(torch.optim.Optimizer):
    "Keeps the size of the last steps in lists within a list, by their number, as RAdam does: one that was not made is not to be found"
    def __init__(self, ps, lr=1e-2): super().__init__(ps, dict(lr=lr, sizes=[[None, None] for _ in range(4)]))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g['params']:
                st = self.state[p]
                st['step'] = st.get('step', 0) + 1
                kept = g['sizes'][st['step'] % 4]
                if kept[0] != st['step']: kept[:] = st['step'],(1 - .9**st['step'])*g['lr']
                p.add_(p.grad, alpha=-kept[1])

@pytest.mark.parametrize('opt,k,why', [(Counts, 'k', None), (Decays, 'weight_decay', "changes 'weight_decay'"),
                                       (torch.optim.SGD, 'lr', None), (Averages, 'lr', None),
                                       (Looks, 'sizes', 'param_groups[sizes] changes within the step')])
def test_an_optimizer_that_changes_numbers_of_its_groups(opt, k, why):
    "Its state is put back, as no container of which nobody knows"
    report = agrees(with_opt(opt, k), why).xla_report()
    assert why or report.per_batch()['executions'] < 1, report.plain

class Begins(torch.optim.Optimizer):
    "Hands its groups and states on to methods and functions that fill them, as those of `pytorch_optimizer` do"
    def __init__(self, ps, lr=1e-2):
        super().__init__(ps, dict(lr=lr))
        self.loops = 2
    def begin(self, group):
        if 'step' not in group: group['step'] = 0
        for p in group['params']:
            if not self.state[p]: self.state[p]['avg'] = torch.zeros_like(p)
    def update(self, p, group, state):
        state['n'] = state.get('n', 0) + 1
        g = p.grad
        for _ in range(self.loops): g = g/(1 + g.square().sum())
        state['avg'].mul_(.9).add_(g)
        p.add_(state['avg'], alpha=-group['lr']*(1 - .9**group['step'])*min(1, state['n']/5))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.begin(group)
            group['step'] += 1
            for p in group['params']: self.update(p, group, self.state[p])

def test_an_optimizer_hands_its_groups_on(monkeypatch):
    "And how often its loop runs is not tried with thousands"
    counts,errors = [],[]
    class Noted(TorchCalls):
        def __exit__(self, kind, e, tb):
            errors.append(str(e))
            counts.append(self.n)
            super().__exit__(kind, e, tb)
    monkeypatch.setattr(recording, 'TorchCalls', Noted)
    report = agrees(with_opt(Begins, 'step'), None).xla_report()
    assert report.per_batch()['executions'] < 1, report.plain
    assert f"more than {2*counts[0]} calls of torch's functions" in errors and max(counts) <= 2*counts[0]

class Elsewhere(Begins):
    "Hands on a dict that is not the optimizer's: nobody would see it filled again"
    seen = {}
    def begin(self, group):
        super().begin(group)
        self.count(self.seen)
    def count(self, seen): seen['n'] = seen.get('n', 0) + 1

def test_a_dict_that_is_not_of_the_optimizer():
    Elsewhere.seen = {}
    def story(): return with_opt(Elsewhere, 'step')()[0],lambda l: Elsewhere.seen.pop('n')
    agrees(story, 'may store into a container of another scope (seen)')
