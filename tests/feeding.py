"DataLoaders on the device, their batches compared, and a look at what they leave behind"
import gc, threading
import pytest
from torch.utils.data import IterableDataset
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.transfer import *

dev = device()
fastai_iter = DataLoader._under___iter__

def feeders(): return [t for t in threading.enumerate() if t.name.startswith('fastai_xla feed')]

@pytest.fixture(autouse=True)
def nothing_left():
    yield
    gc.collect()
    assert not feeders()

def host(o): return fetch(to_device(o, dev) if not has_xla(o) else o)

def same(a, b):
    "Equal in structure, types, dtypes, attributes and values"
    if type(a) is not type(b): return False
    if isinstance(a, torch.Tensor):
        return (a.dtype == b.dtype and a.shape == b.shape and str(a.__dict__) == str(b.__dict__)
                and torch.equal(a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor)))
    if isinstance(a, dict): return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple, L)): return len(a) == len(b) and all(map(same, a, b))
    return a == b

class Items:
    "Items of `make(i)`, and who fetched them"
    def __init__(self, n, make): self.n,self.make,self.by = n,make,[]
    def __len__(self): return self.n
    def __getitem__(self, i):
        self.by.append(threading.current_thread().name.split('_0')[0])
        return self.make(i)

class Stream(IterableDataset):
    def __init__(self, n): self.it = iter(range(n))
    def __iter__(self): return self
    def __next__(self): return torch.tensor(next(self.it))

def loader(make=lambda i: (torch.full((3,), float(i)), torch.tensor(i)), n=22, bs=4, cls=DataLoader, **kwargs):
    return cls(Items(n, make), bs=bs, device=dev, **kwargs)
