"Tensors that share memory follow each other, across steps that are replayed or retraced: as on the CPU"
from by_log import *
from test_kinds_of_code import hooked

stories = {}
def story(f):
    stories[f.__name__] = f
    return f

def penalty(cb, t): cb.learn.loss_grad = cb.learn.loss_grad + .1*t
def memory(make, change, look=lambda cb: cb.seen.append(sum(t.sum() for t in cb.kept)), at=(3, 6)):
    "A callback that keeps results in every third step, and changes them in place in another step"
    def before_fit(cb): cb.seen,cb.kept = cb.learn.seen,None
    def after_pred(cb):
        if cb.training and cb.train_iter%at[0] == 0: cb.kept = make(cb)
    def after_step(cb):
        with torch.no_grad():
            if cb.train_iter%at[1] == 2: change(cb, cb.kept)
            if cb.train_iter%at[0] == 2: look(cb)
    def see(learn): return [torch.as_tensor(o) for o in learn.seen]
    def story():
        def begin(cb):
            cb.learn.seen = []
            before_fit(cb)
        return hooked(before_fit=begin, after_pred=after_pred, after_step=after_step) | dict(see=see)
    return story()

def bank(cb): return cb.pred.detach()[:4].repeat(1, 6)*(1+torch.arange(6, device=cb.pred.device))

@story
def rows_of_a_bank_and_the_bank():
    def make(cb):
        b = bank(cb)
        return [b, *b]
    return memory(make, lambda cb, k: k[0].mul_(3))

@story
def rows_of_a_bank_that_is_gone():
    def change(cb, k): k[1].mul_(3)
    return memory(lambda cb: list(bank(cb)), change)

@story
def halves_and_the_whole():
    def make(cb):
        b = bank(cb)
        return [b, *b.chunk(2)]
    return memory(make, lambda cb, k: k[1].add_(1))

@story
def a_row_of_a_column():
    def make(cb):
        b = bank(cb)
        return [b.t()[2], b[:,2:4][1:], b]
    return memory(make, lambda cb, k: k[2][1].mul_(2))

@story
def a_view_that_changes_the_whole():
    def make(cb):
        b = bank(cb)
        return [b, b.view(-1)[3:7]]
    return memory(make, lambda cb, k: k[1].zero_())

@story
def a_detached_prediction():
    return memory(lambda cb: [cb.pred.detach(), cb.learn.pred], lambda cb, k: k[0].mul_(2), at=(3, 3))

@story
def a_row_of_a_bank_from_before():
    "The bank is no result of the step that takes a view of it"
    def make(cb):
        if not hasattr(cb, 'bank'): cb.bank = bank(cb)
        return [cb.bank[1], cb.bank[:,1]]
    def change(cb, k):
        cb.bank.mul_(.9)
        cb.bank[1] += .1
    return memory(make, change)

@story
def a_row_of_a_row():
    def make(cb):
        if not hasattr(cb, 'bank'): cb.bank = bank(cb)
        cb.row = cb.bank[1]
        return [cb.row[2:], cb.row]
    return memory(make, lambda cb, k: cb.row.add_(1), look=lambda cb: cb.seen.append(cb.bank.sum() + cb.kept[0].sum()))

@story
def a_view_of_a_buffer_used_beside_it():
    "Both are given to each step, and one is changed"
    def before_fit(cb):
        cb.bank = torch.ones(4, 3).to(cb.dls.device)
        cb.row = cb.bank[1]
        cb.learn.seen = []
    def after_loss(cb):
        if cb.training: penalty(cb, cb.pred.mean()*(cb.row.mean() + cb.bank.mean()))
    def after_step(cb):
        if cb.train_iter%5 < 3: cb.bank.mul_(.9)
        if cb.train_iter%4 == 1: cb.learn.seen.append(cb.row.sum())
    return hooked(before_fit=before_fit, after_loss=after_loss, after_step=after_step) | dict(see=lambda l: l.seen)

@story
def a_view_from_before_the_fit_that_no_step_is_given():
    def before_fit(cb):
        cb.bank = torch.ones(4, 3).to(cb.dls.device)
        cb.row,cb.learn.seen = [cb.bank[1]],[]
    def after_loss(cb):
        if cb.training: penalty(cb, cb.pred.mean()*cb.bank.mean())
    def after_step(cb): cb.bank.mul_(.9)
    def after_batch(cb):
        if cb.training and cb.iter%5 == 2: cb.learn.seen.append(cb.row[0].sum())
    return hooked(before_fit=before_fit, after_loss=after_loss, after_step=after_step, after_batch=after_batch) | dict(see=lambda l: l.seen)

@story
def places_that_share_a_number():
    def change(cb, k):
        k[0][0].expand(3, -1).zero_()
        k[0].unfold(1, 3, 2)[2:,1].masked_fill_(k[0].unfold(1, 3, 2)[2:,0] > 0, .5)
        k[0].unfold(1, 5, 5).mul_(2)
    return memory(lambda cb: [bank(cb)], change)

class FlatBuffer(Callback):
    "Parameters as views of one buffer, as for one fused update"
    def before_fit(self):
        ps,at = list(self.model.parameters()),0
        self.flat = torch.cat([p.data.flatten() for p in ps])
        for p in ps:
            p.data = self.flat[at:at+p.numel()].view_as(p)
            at += p.numel()
    def after_step(self): self.norm = self.flat.norm()

@story
def parameters_of_one_buffer(): return dict(cbs=FlatBuffer, opt_func=SGD, see=lambda learn: [p.detach() for p in learn.model.parameters()])

@pytest.mark.parametrize('name', stories)
def test_as_on_the_cpu(name):
    a,c = references(stories[name], n=2)
    b,_ = run(stories[name], 'auto', n=2)
    for want,tol in ((a, 1e-6), (c, 1e-4)):
        for k in want:
            for x,y in zip(leaves(want[k]), leaves(b[k]), strict=True):
                torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), rtol=tol, atol=tol, msg=lambda m: f'{k}: {m}')

def test_a_kept_view_of_shared_numbers_is_not_filled_beside_its_base():
    def make(cb):
        b = bank(cb)
        return [b, b[0].expand(3, -1)]
    def fill(cb, k): k[1].zero_()
    run(lambda: memory(lambda cb: make(cb)[1:], lambda cb, k: k[0].zero_()), 'auto', n=2)   # without it there is nothing to share with
    run(lambda: memory(make, fill), False, n=2)
    with pytest.raises(RuntimeError, match='of which tensor it is a view is not known'): run(lambda: memory(make, fill), 'auto', n=2)

class HoldsStatistics(Callback):
    "Holds a part of a running mean for the whole fit, looks at it, and at the mean, at each epoch's end"
    def before_fit(self): self.part,self.seen = self.model[1].running_mean[:4],[]
    def after_epoch(self):
        float(self.part.sum())   # does not follow within a fit: torch_xla's kernels change statistics unheard by views
        self.seen.append(self.model[1].running_mean.sum())

def test_a_view_of_running_statistics_outlives_traces():
    "The trace that was refused forgot what the view was to become, and the process ended at the next sync"
    from test_log import data, manual_seed
    def fit(**kwargs):
        torch.manual_seed(0)
        learn = Learner(data(), nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)), nn.MSELoss(), cbs=HoldsStatistics(),
                        opt_func=SGD)   # Adam would amplify the rounding of a bias before BatchNorm
        learn.dls.train.shuffle = False
        if kwargs: learn.to_xla(**kwargs)
        with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
        return [float(o) for o in learn.holds_statistics.seen]
    cpu = fit()
    for replay in (True, False): test_close(fit(replay=replay), cpu, 1e-4)

def shrink(learn):
    "Weights through a vector, of which they are slices from then on"
    ps = list(learn.model.parameters())
    vec = nn.utils.parameters_to_vector(ps).detach()*.9
    nn.utils.vector_to_parameters(vec, ps)
    return vec

def shrinking(**kwargs):
    from common import image_dls
    return Learner(image_dls(n=4*8, n_valid=2*8, bs=8, size=4), nn.Sequential(nn.Flatten(), nn.Linear(16, 4)),
        loss_func=lambda p, t: F.cross_entropy(p, t), opt_func=SGD, **kwargs)

@pytest.mark.parametrize('event', ['before_fit', 'after_epoch'])
def test_weights_that_were_slices_of_a_vector_are_replayed(event, monkeypatch):
    from on_both import compare, plain
    def shrinks(cb): shrink(cb.learn)
    make = lambda: shrinking(cbs=Callback(**{event: shrinks}))
    def fits(learn):
        learn.fit(2, .1)
        learn.fit(2, .1)
    assert not plain(compare(make, fits))
    if event == 'after_epoch': return   # one control is enough
    monkeypatch.setattr('fastai_xla.opt_callback.own_memory', noop)
    assert any('alias or a view' in why for why in plain(compare(make, fits, replays=['auto'])))

def test_slices_of_a_vector_that_is_held_are_told():
    "What validation has recorded before is right, though an audit traces it otherwise"
    from on_both import compare, plain
    def fits(learn):
        learn.fit(2, .1)
        learn.vec = shrink(learn)
        learn.fit(2, .1)
    whys = plain(compare(shrinking, fits))
    assert any('alias or a view' in why for why in whys) and not any('audit' in why for why in whys), whys
