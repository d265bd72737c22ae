"With several steps as one, what a function under `lru_cache` keeps: no place tells of it"
import functools, itertools
import numpy as np, pytest, torch
import torch.nn.functional as F
from test_several_unseen import agrees

def bigger(a): return np.multiply(a, 1.05, out=a).sum()
def of_cache(make, use, *args):
    "The loss is scaled by what a function under `lru_cache` has made at its first call"
    def story():
        kept = functools.lru_cache(*args)(make)
        def loss(p, y): return F.mse_loss(p, y)*use(kept(p.device))
        return dict(loss_func=loss),lambda learn: kept.cache_info().currsize
    return story

draws,moves = 'draw from what make gives','what make gives changes'
caches = dict(count=(lambda d: itertools.count(), lambda c: 1+.1*next(c), draws),
              generator=(lambda d: np.random.default_rng(0), lambda g: .5+g.random(), draws),
              array=(lambda d: np.ones(2), bigger, moves),
              tensor=(lambda d: torch.ones(2), lambda t: t.mul_(1.05).sum().item(), 'may store into a container'),
              on_device=(lambda d: torch.ones(2, device=d), lambda t: t.mul_(1.05).sum(), moves))

# in a list with a size, or a dict without
@pytest.mark.parametrize('kind,size', [*((kind, ()) for kind in caches), *((kind, (None,)) for kind in ('count', 'array'))])
def test_what_a_cache_keeps_moves(kind, size):
    make,use,why = caches[kind]
    make.__name__ = 'make'
    agrees(of_cache(make, use, *size), why, n=3)

def test_what_a_cache_keeps_stays():
    "Steps go as one: a tensor that nobody changes is made within them"
    def story():
        kept = functools.lru_cache(lambda device: torch.full((2,), .5, device=device))
        def loss(p, y): return F.mse_loss(p, y)*kept(p.device).sum()
        return dict(loss_func=loss),lambda learn: 0
    agrees(story, None)

def test_a_cache_is_asked_for_its_counts():
    def story():
        kept = functools.lru_cache(lambda: 0)
        def loss(p, y): return F.mse_loss(p, y)*(1 + kept() + .1*kept.cache_info().hits)
        return dict(loss_func=loss),lambda learn: kept.cache_info()
    agrees(story, 'asks how often a cache was asked')
