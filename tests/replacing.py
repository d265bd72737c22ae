"A callback of the user's, and fits compared where something is replaced"
from by_log import *

class Tick(Callback):
    "With it the user's code runs at every step"
    n = 0
    def before_batch(self): self.n += 1

def seed():
    for f in (torch.manual_seed, np.random.seed, random.seed, manual_seed): f(0)

def conv(): return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(24, 1))

def same(story, ticks=(False,)):
    """Losses and weights of replayed fits as those of a retraced one and of fastai on the CPU; the learner of the last

    Of each of `ticks`: with `Tick`, which changes nothing of the numbers, beside what the story does, or without"""
    cpu,plain = (run(story, False, xla, n=2)[0] for xla in (False, True))
    for tick in ticks:
        def ticked():
            kwargs = dict(cbs=list) | story()
            return kwargs | dict(cbs=lambda: [*kwargs['cbs'](), *[Tick()]*tick])
        got,learn = run(ticked, 'auto', n=2)
        for want,eps in ((plain, 1e-6), (cpu, 2e-4)):
            test_close(got['losses'], want['losses'], eps=eps)
            for k,v in want['sd'].items(): test_close(got['sd'][k], v, eps=eps*10)
    return learn
