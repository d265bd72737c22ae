"A metric that keeps predictions is asked for its value before the epoch is over, as progress bars of others do"
from operator import attrgetter
from by_log import *

class Shows(Callback):
    order = 60
    def before_fit(self): self.seen = []
    def after_batch(self):
        mets = self.recorder._train_mets if self.training else self.recorder._valid_mets
        self.seen.append([float(m.value) for m in mets if getattr(m, 'count', 1)])

def labels(n=192):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(n, 6, generator=g)
    its = list(zip(x, (x[:,0] > x[:,1]).long()))
    return DataLoaders.from_dsets(its[:160], its[160:], bs=16, num_workers=0)

def test_values():
    "In validation, and in training, where the recorder is asked for that"
    cb = Shows()
    def story():
        def cbs(): return [cb, Callback(before_fit=lambda self: setattr(self.recorder, 'train_metrics', True))]
        return dict(dls=labels, model=partial(mlp, 2), loss_func=CrossEntropyLossFlat, metrics=[F1Score(average='macro'), accuracy],
                    cbs=cbs, see=lambda learn: cb.seen)
    refs = references(story)
    same(story, 1e-6, refs=refs)
    for a,b in zip(cb.seen, refs[1]['see'], strict=True): test_close(a, b, 1e-5)

# The running loss, under a name that does not stand in the code

class Logs(Callback):
    "Before the recorder: what it sees is of the batch before"
    def __init__(self, *paths): self.paths,self.seen = paths,[]
    def after_batch(self):
        if self.training and self.train_iter > 1: self.seen.append([float(attrgetter(p)(self.learn)) for p in self.paths])
class Sets(Callback):
    seen = ()
    def after_batch(self):
        if self.training and self.train_iter == 6: setattr(self.recorder.smooth_loss, 'beta', .3)

@pytest.mark.parametrize('make', [partial(Logs, 'recorder.smooth_loss.value', 'recorder.smooth_loss.count'), Sets], ids=['logs', 'sets'])
def test_the_running_loss_by_a_computed_name(make):
    def left(there):
        set_seed(0)
        cb = make()
        learn = there(Learner(labels(), mlp(2), loss_func=CrossEntropyLossFlat(), cbs=cb))
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2)
        return [*map(float, learn.recorder.losses)],list(cb.seen)
    want = left(noop)
    for there in (Learner.to_xla, partial(Learner.to_xla, steps_per_execution=3)):
        for a,b in zip(left(there), want, strict=True): torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-4, atol=1e-5)
