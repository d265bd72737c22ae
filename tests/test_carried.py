"What tensors carry, numbers that a tensor cannot hold, and gradients that somebody keeps: replayed as retraced, and as fastai on the CPU"
import concurrent.futures, pytest
from torchvision import tv_tensors
from fastai.vision.all import *
from fastai_xla.all import *

def mlp(): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

class Keep(Callback):
    order = 99
    def before_fit(self): self.losses = []
    def after_loss(self): self.losses.append(self.learn.loss.detach().clone())

def fitted(cb, model=mlp, loss=None, opt=SGD, replay=None):
    "Losses and weights after a fit, what the callback has seen, and why steps were not replayed"
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    ds = list(zip(x, (x[:,0] > 0).long()))
    dls = DataLoaders.from_dsets(ds, ds[:16], bs=8, num_workers=0, shuffle=False)
    learn = Learner(dls, model(), loss_func=loss or nn.CrossEntropyLoss(), opt_func=opt, cbs=[c := cb(), k := Keep()])
    if replay is not None: learn.to_xla(replay=replay)
    with learn.no_bar(), learn.no_logging(): learn.fit(2, .1)
    return ([float(l.cpu()) for l in k.losses], [t.detach().cpu().float() for t in learn.model.state_dict().values()],
            [float(v) for v in c.seen], list(learn.xla_opt.replay.fit.plain) if replay else [])

def check(cb, replayed=True, **kwargs):
    """As on the CPU, and as retraced; why steps were not replayed

    `replayed` is False where none is, and None where some may not be"""
    cpu,auto = (fitted(cb, replay=r, **kwargs) for r in (None, 'auto'))
    plain = fitted(cb, replay=False, **kwargs) if replayed is not False else auto
    test_close(auto[0], plain[0], eps=1e-6)
    for a,b,c in zip(auto[1], plain[1], cpu[1]):
        test_close(a, b, eps=1e-6)
        test_close(a, c, eps=1e-4)
    test_close(auto[0], cpu[0], eps=1e-4)
    test_close(auto[2], cpu[2], eps=1e-4)
    assert not (replayed and auto[3]), auto[3]
    return auto[3]

class Seeing(Callback):
    def __init__(self): self.seen = []

carriers = dict(as_subclass=lambda t: t.as_subclass(TensorBase), mul=lambda t: TensorBase(t)*2, relu=lambda t: F.relu(TensorBase(t)),
                chunk=lambda t: TensorBase(t).chunk(2, 1)[1], deepcopy=deepcopy, point=lambda t: TensorPoint(t, img_size=t.w)*2)

@pytest.mark.parametrize('ways', ['as_subclass mul point', 'relu chunk deepcopy'])
def test_attributes_that_are_others_at_each_step(ways):
    class Weigh(Seeing):
        def after_loss(self):
            for how in ways.split():
                t = self.pred.detach()
                t.w = self.train_iter
                u = carriers[how](t)
                self.seen.append(getattr(u, 'img_size', None) or u.w)
            self.learn.loss_grad = self.loss_grad/(1+sum(self.seen[-3:])/3)
    check(Weigh)

def test_weights_that_travel_with_predictions():
    class Attach(Seeing):
        def after_pred(self):
            p = TensorBase(self.pred)
            p.w = self.x[:,0].abs()*(1+self.pct_train)
            self.learn.pred = p
    def loss(p, t):
        q = p/2.
        return (F.cross_entropy(q.as_subclass(torch.Tensor), t, reduction='none')*q.w).mean()
    check(Attach, loss=loss)

def test_boxes_have_their_format():
    class Boxes(Seeing):
        def after_loss(self):
            n = 10+self.train_iter
            b = tv_tensors.BoundingBoxes(self.pred.detach().abs().repeat(1, 2), format='XYXY', canvas_size=(n, n)).clone()
            self.seen.append(b.canvas_size[0])
    assert 'BoundingBoxes' in check(Boxes, replayed=False)[0]

bools = dict(constants=(lambda n: 0, lambda n: False), a_float=(lambda n: 0.,), in_turn=(lambda n: n%2,), three=(lambda n: n//3%2,))

@pytest.mark.parametrize('name', bools)
def test_a_number_among_bools(name):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.n = mlp(),0
        def forward(self, x):
            m = (x[:,:1].expand(-1, 6) > 0).clone()
            for i,f in enumerate(bools[name]):
                m[:,3*i] = f(self.n)
                m[:,3*i+1:3*i+3].fill_(f(self.n+1))
            self.n += 1
            return self.body(x.masked_fill(m, 0.))
    check(Seeing, model=Masked, replayed=name == 'constants' or None)

fills = dict(full=lambda x, v: torch.full((len(x),), v, dtype=torch.long, device=x.device),
             new=lambda x, v: x.long()[:,0].new_full((len(x),), v),
             fill=lambda x, v: torch.zeros(len(x), dtype=torch.long, device=x.device).fill_(v))

@pytest.mark.parametrize('name', fills)
def test_a_fraction_among_integers(name):
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.emb,self.n = mlp(),nn.Embedding(8, 6),0
        def forward(self, x):
            self.n += 1
            return self.body(x+self.emb(fills[name](x, self.n/20)))
    assert '0.05 -> 0.1' in check(Seeing, model=Embedded, replayed=False)[0]

@pytest.mark.parametrize('every', [2, 3])   # an audit comes with each second one, or beside them
@pytest.mark.parametrize('reads', [False, True])
def test_a_gradient_that_is_kept_while_others_are_added(every, reads):
    class Accumulate(Seeing):
        k,ref = 0,None
        def before_step(self):
            if self.k%every == 0: self.ref = self.model[0].weight.grad
            self.seen.append(self.ref is self.model[0].weight.grad)
            self.k += 1
            if self.k%every: raise CancelBatchException
            if reads: self.seen.append(self.ref.norm())
            else: self.ref.div_(every)
    check(Accumulate)

def test_gradients_in_a_list_while_none_is_cleared():
    class Third(Seeing):
        def before_step(self):
            if self.iter%3 == 0: self.grads = [p.grad for p in self.model.parameters()]
            if self.iter%3 == 2: torch._foreach_mul_(self.grads, .1)
        def after_step(self):
            if self.iter%3 != 2: raise CancelBatchException
    check(Third, replayed=None)

def test_gradients_that_are_parts_of_one_buffer():
    class Flat(torch.optim.Optimizer):
        def __init__(self, ps, lr=.1):
            super().__init__(ps, dict(lr=lr))
            ps = [p for g in self.param_groups for p in g['params']]
            self.flat = torch.zeros(sum(p.numel() for p in ps), device=ps[0].device)
            for p,g in zip(ps, self.flat.split([p.numel() for p in ps])): p.grad = g.view_as(p)
        def zero_grad(self, set_to_none=False): self.flat.zero_()
        @torch.no_grad()
        def step(self, closure=None):
            for g in self.param_groups:
                for p in g['params']: p.add_(p.grad, alpha=-g['lr'])
    check(Seeing, opt=partial(OptimWrapper, opt=Flat), replayed=False)

def test_a_pool_of_the_standard_library_is_another_thread():
    pool = concurrent.futures.ThreadPoolExecutor(1)
    class Log(Seeing):
        def after_loss(self): self.later = pool.submit(lambda l: l*2, self.learn.loss.detach())
        def after_batch(self): self.seen.append(self.later.result())
    assert 'thread' in check(Log, replayed=False)[0]

def test_a_scripted_module_among_others():
    def model(): return nn.Sequential(torch.jit.script(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2))
    assert 'scripted' in check(Seeing, model=model, replayed=False)[0]

def test_a_scripted_module_where_steps_are_recorded(recorded):
    def model(): return torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)))
    assert 'model is a scripted module' in check(Seeing, model=model, replayed=False)[0]

def test_a_nan_is_the_number_that_it_was():
    class Nan(Seeing):
        def after_loss(self): self.nans = torch.full((3,), float('nan'), device=self.x.device)
    check(Nan)

def test_an_attribute_of_a_result_is_not_there_at_the_next_step():
    "Also where a step has gone on otherwise than the one before"
    class Marks(Seeing):
        def after_loss(self):
            t = self.pred.detach()
            u = t*2
            self.seen += [hasattr(t, 'w'), hasattr(u, 'w')]
            t.w = u.w = 1
            if self.iter in (5, 6, 7): self.other = u.tanh() if self.iter == 6 else (u+1).sum()
    check(Marks)

@pytest.mark.parametrize('event', ['before_step', 'after_step'])
def test_a_callback_predicts_within_the_step(event):
    "By callbacks that come for the prediction and go after it"
    def look(cb):
        if cb.training and cb.learn.iter == 4:
            with cb.learn.no_bar(): cb.seen.append(cb.learn.get_preds(ds_idx=1)[0].sum())
            cb.model.train()
            cb.learn.training = True
    check(type('Predicts', (Seeing,), {event: look}), replayed=None)
