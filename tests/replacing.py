"A callback of the user's, and fits compared where something is replaced"
from by_log import *

class Tick(Callback):
    "With it the user's code runs at every step"
    n = 0
    def before_batch(self): self.n += 1

def seed():
    for f in (torch.manual_seed, np.random.seed, random.seed, manual_seed): f(0)

def conv(): return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(24, 1))

def same(story):
    "Losses and weights of a replayed fit as those of a retraced one and of fastai on the CPU; the learner"
    (cpu,_),(plain,_),(got,learn) = (run(story, replay, xla, n=2) for replay,xla in ((None, False), (False, True), ('auto', True)))
    for want,eps in ((plain, 1e-6), (cpu, 2e-4)):
        test_close(got['losses'], want['losses'], eps=eps)
        for k,v in want['sd'].items(): test_close(got['sd'][k], v, eps=eps*10)
    return learn
