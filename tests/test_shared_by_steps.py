"What a step leaves behind that shares memory with what it updates: it is replayed, and goes on sharing it"
import torch
from torch import nn
from fastai.vision.all import *
from fastai_xla.all import *
from by_log import agree, counts

class SAM(torch.optim.Optimizer):
    "As in davda54/sam: the old parameter becomes the new one's memory, and stays in the state"
    def __init__(self, params, lr=.1, rho=.05):
        super().__init__(params, dict(rho=rho, lr=lr))
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr, momentum=.9)
        self.param_groups = self.base_optimizer.param_groups
    @torch.no_grad()
    def first_step(self):
        ps = [(p, g['rho']) for g in self.param_groups for p in g['params'] if p.grad is not None]
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p,_ in ps]), p=2)
        for p,rho in ps:
            self.state[p]['old_p'] = p.data.clone()
            p.add_(p.grad*(rho/(norm+1e-12)).to(p))
        self.zero_grad()
    @torch.no_grad()
    def second_step(self):
        for g in self.param_groups:
            for p in g['params']:
                if p.grad is not None: p.data = self.state[p]['old_p']
        self.base_optimizer.step()
        self.zero_grad()

class TwoSteps(Callback):
    def before_step(self):
        opt = self.opt.opt
        opt.first_step()
        self.learn.loss_func(self.learn.model(*self.xb), *self.yb).backward()
        opt.second_step()
        raise CancelStepException()

def old(learn): return [s['old_p'] for s in learn.opt.opt.state.values()]

def test_an_optimizer_whose_state_is_the_memory_of_the_parameters():
    learn = agree(lambda: dict(opt_func=partial(OptimWrapper, opt=SAM), cbs=TwoSteps, see=old), branches=None, tol=2e-6)
    assert counts(learn)[True]['replayed'] >= 28 and not learn.xla_report().plain
    ps = list(learn.model.parameters())
    with torch.no_grad(): ps[0].add_(1.)   # as on the CPU, where the two are one
    assert torch.equal(old(learn)[0].cpu(), ps[0].detach().cpu())

class Holds(Callback):
    "Keeps an alias of a weight"
    def after_step(self): self.learn.w = next(self.model.parameters()).detach()
    def after_batch(self): self.learn.seen = getattr(self.learn, 'seen', []) + [self.learn.w.clone()]

def test_an_alias_that_each_step_replaces():
    learn = agree(lambda: dict(cbs=Holds, see=lambda learn: [learn.w, *learn.seen]), branches=None, tol=2e-6)
    assert counts(learn)[True]['replayed'] == 29

class HoldsAll(Callback):
    "Keeps them all, which are one on the CPU"
    def after_step(self): self.learn.ws = getattr(self.learn, 'ws', []) + [next(self.model.parameters()).detach()]

def test_aliases_that_are_kept_stop_the_replay():
    learn = agree(lambda: dict(cbs=HoldsAll, see=lambda learn: learn.ws), branches=None, tol=2e-6)
    assert any('an alias' in why for why in learn.xla_opt.replay.reasons.why)
