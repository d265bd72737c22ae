"Learners whose items change or draw, and a fit by single steps and by several as one compared with that of fastai on the CPU"
from test_several_unseen import *

class Items:
    "Items that depend on a number, a list and an array, and on what is drawn"
    def __init__(self, xy, noise=None): self.xy,self.noise,self.d,self.w,self.ws = xy,noise,1.,[1.],np.ones(3)
    def __len__(self): return len(self.xy)
    def __getitem__(self, i):
        x,y = self.xy[i]
        x = x*self.d*self.w[0]*self.ws[0].item()
        return x*(1+self.noise()) if self.noise else x,y
    def set_difficulty(self, d): self.d = d

def of_torch(): return torch.rand(1).item()
draws = dict(random=random.random, numpy=np.random.rand, torch=of_torch)

def loaders(draw=None, **kwargs):
    xy = items()
    return DataLoaders.from_dsets(Items(xy[:160], draw), Items(xy[160:], draw), bs=16, num_workers=0, **kwargs)

def left(make, n=2, **to):
    "What a fit of `make()` leaves, on the CPU without `to`, and why steps have been run one by one"
    for seed in (torch.manual_seed, np.random.seed, random.seed, manual_seed): seed(3)
    learn,see = make()
    if to: learn.to_xla(**to)
    with warnings.catch_warnings(record=True) as told, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(n, 1e-2)
    told = [str(w.message) for w in told]
    assert not [s for s in told if 'read ahead' in s], told
    return ([float(o) for o in learn.recorder.losses], list(host(learn.model.state_dict()).values()), host(see(learn)),
            draw_next()), [s for s in told if 'run one by one' in s]

def draw_next(): return random.random(),float(np.random.rand()),float(torch.rand(1))

_own_state = 'change what the next one depends on'

def in_order(make, why, k=3, n=2, cpu=True):
    """The same losses, weights, draws and what is seen on the CPU, by single steps and by `k` as one; these one by one for the reason `why`

    Where the reason is what the steps leave, single steps go as these do, and the CPU says what is right"""
    several,told = left(make, n, steps_per_execution=k)
    one = several if why == _own_state and cpu else left(make, n, steps_per_execution=1)[0]
    host = left(make, n)[0] if cpu else several
    for a,b,c in zip(*map(leaves, (host, one, several)), strict=True):
        torch.testing.assert_close(*map(torch.as_tensor, (c, b)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(*map(torch.as_tensor, (c, a)), rtol=1e-3, atol=1e-4, check_dtype=False)
    assert len(told) == bool(why) and (why or '') in ''.join(told), told

def learner(dls=data, loss_func=F.mse_loss, see=lambda learn: [], model=None, **kwargs):
    m = model() if model else nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return Learner(dls(), m, loss_func=loss_func, **kwargs),see

class After(Callback):
    "After each batch of training"
    def __init__(self, f): self.f = f
    def after_batch(self):
        if self.training: self.f(self.learn)

class Sees(Callback):
    def __init__(self, draw): self.draw,self.seen = draw,[]
    def after_batch(self): self.seen.append(self.draw())

class Factor:
    def __init__(self): self.n = 0
    def up(self): self.n += 1
    def by(self): return 1-.03*self.n
