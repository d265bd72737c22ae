"""Many devices: each run in a process of its own, on virtual devices of the CPU

Losses are compared with one device's to 1e-6 of their size, weights to 1e-5 of the largest in their tensor
where `weight_tol` says no other."""
import os, tempfile
from functools import lru_cache
from math import prod
from pathlib import Path
import pytest, torch
from own_process import run

def python(args, n, **env):
    "Output of a process with `n` devices"
    clean = {k: v for k,v in os.environ.items() if k not in ('WORLD_SIZE', 'XLA_USE_SPMD')}
    with tempfile.TemporaryDirectory() as d: res = run(args, Path(d), env=clean | dict(CPU_NUM_DEVICES=str(n)) | env)
    assert res.returncode == 0, res.stdout[-2000:] + res.stderr[-4000:]
    return res.stdout

@lru_cache
def train(n, *specs):
    "Spec -> what `many.run` gives"
    with tempfile.TemporaryDirectory() as d:
        python(['-m', 'tests.many', n, Path(d)/'found.pt', *specs], n)
        res = torch.load(Path(d)/'found.pt', weights_only=False)
    assert not (failed := {k: v for k,v in res.items() if isinstance(v, str)}), failed
    return res

def apart(a, b): return (torch.as_tensor(a)-torch.as_tensor(b)).abs().max().item()
def stack(ts): return torch.stack([t.as_subclass(torch.Tensor) for t in ts])
def loss_error(a, b): return ((stack(a['losses'])-stack(b['losses'])).abs()/stack(a['losses']).abs()).max().item()
def errors(a, b):
    "Weight -> difference, as a part of the largest in its tensor"
    ws = {k: w for k,w in a['weights'].items() if w.is_floating_point() and w.numel()}
    return {k: apart(w, b['weights'][k])/max(w.abs().max().item(), 1e-12) for k,w in ws.items()}

def same(a, b):
    pairs = [(v, b[part][k]) for part in ('weights', 'state') for k,v in a[part].items()] + [*zip(a['losses'], b['losses'])]
    return all(torch.equal(torch.as_tensor(v), torch.as_tensor(w)) for v,w in pairs)

# Their true gradient is zero: that of attention's keys does not change a softmax. What Adam makes of it is rounding
no_gradient = dict(convnet=(), tabular=(), text=(), words=('in_proj_bias',), unet=())
# of the convnet a bias of a BatchNorm, which begins at 0: from 2e-6 to 2e-5 by the seed of its augmentations
loss_tol,weight_tol = dict(unet=1e-5),dict(unet=1e-4, convnet=5e-5)
slow = ('unet', 'text')

@pytest.mark.parametrize('name', no_gradient)
def test_models(name):
    one = train(1, name)[name]
    plain = [] if name in slow else [f'{name}/fsdp/plain']
    four = train(4, name, f'{name}/fsdp', *plain)
    for how,r in four.items():
        assert loss_error(one, r) < loss_tol.get(name, 1e-6), how
        assert apart(one['values'], r['values']) < 1e-4*max(map(abs, one['values'][0])), how
        wrong = {k: v for k,v in errors(one, r).items() if v > weight_tol.get(name, 1e-5) and not k.endswith(no_gradient[name])}
        assert not wrong, (how, wrong)
    assert all(same(four[p.removesuffix('/plain')], four[p]) for p in plain)
    for how in (name, f'{name}/fsdp'): assert [c[:2] for c in four[how]['steady'][:3]] == [(0, 1)]*3
    assert four[name]['sent'][0] == four[name]['sent'][1]
    split = {k for k,v in four[f'{name}/fsdp']['layouts'].items() if v != '{replicated}'}
    assert {k for k,w in one['weights'].items() if w.dim() > 1} & split and set(four[name]['layouts'].values()) == {'{replicated}'}
    for which in ('weights', 'state') if name in ('text', 'words') else ():
        whole,part = held(four[f'{name}/fsdp'], which)
        assert part < 1.05/4*whole

def held(r, which):
    "Bytes of `weights` or `state`, and of them those on one of the devices"
    def parts(text): return prod(int(i) for i in text[len('{devices=['):text.index(']')].split(',')) if 'devices' in text else 1
    ts = {k: t for k,t in r[which].items() if 'running' not in k and 'batches' not in k}
    return sum(t.nbytes for t in ts.values()),sum(t.nbytes/parts(r['layouts'][k]) for k,t in ts.items())

def test_two_and_eight():
    one = train(1, 'convnet')['convnet']
    for n,how in ((2, 'convnet/2'), (8, 'convnet/fsdp')):
        r = train(n, how)[how]
        assert loss_error(one, r) < 1e-6 and max(errors(one, r).values()) < weight_tol['convnet'], (n, how)

def test_faults_are_seen():
    "BatchNorm that is not synchronised gives other losses; labels that are not split are sent four times"
    one,ghost = train(1, 'images', 'images/ghost').values()
    assert loss_error(one, ghost) > 1e-4
    whole = train(4, 'images/whole')['images/whole']
    assert loss_error(one, whole) < 1e-6 and whole['sent'][1] == whole['sent'][0] + 3*16*8

def test_uneven_batches():
    names = [f'batch{n}' for n in (50, 18, 3, 1)]
    one,four = train(1, *names),train(4, *names)
    for k in names:
        assert apart(stack(one[k]['losses']), stack(four[k]['losses'])) < 2e-6, k
        assert apart(one[k]['values'], four[k]['values']) < 2e-6, k
        for n,w in one[k]['weights'].items():
            if 'running' in n: assert apart(w, four[k]['weights'][n]) < 2e-6, (k, n)
