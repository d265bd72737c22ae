"A metric that keeps predictions is asked for its value before the epoch is over, as progress bars of others do"
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
