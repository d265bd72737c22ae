"""Batches on their way to the device

The same as fastai's, one transfer each, read ahead where that changes no number, and nothing left behind."""
import _thread, collections, gc, random, signal, subprocess, sys, threading, time, traceback
from contextlib import contextmanager
from types import SimpleNamespace
from pydoc_data.topics import topics
import pytest, torch_xla, torch_xla.debug.metrics as met
from torch.utils.data import IterableDataset
from fastai.vision.all import *
from fastai.tabular.all import *
from fastai.text.all import *
from fastai.test_utils import *
import fastai_xla.data as data, fastai_xla.transfer as transfer
from fastai_xla.all import *
from fastai_xla.data import *
from fastai_xla.runtime import *
from fastai_xla.graphs import *
from fastai_xla.transfer import *
from fastai_xla.cli import digits_path, digits_dls
from common import image_dls, image_learner
from probe import *

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

# the same batches

def images(path): return digits_dls(path).train.new(bs=100, n=450)
def augmented(path):
    dls = ImageDataLoaders.from_folder(path, train='train', valid='valid', item_tfms=RandomResizedCrop(8),
                                       batch_tfms=[*aug_transforms(), Normalize.from_stats(*imagenet_stats)], num_workers=0, bs=100)
    return dls.train.new(n=300)
def table(path, cls=TabularDataLoaders):
    df = pd.DataFrame(dict(a=np.arange(90)%5, b=np.arange(90.)**.5, c=np.arange(90)[::-1]/7, y=np.arange(90)%2))
    return cls.from_df(df, procs=[Categorify, FillMissing, Normalize], cat_names=['a'], cont_names=['b', 'c'],
                       y_names='y', y_block=CategoryBlock(), bs=8, valid_idx=range(60, 90)).train
def texts(n): return pd.DataFrame(dict(text=[topics[k] for k in sorted(topics)[:n]], label=[i%2 for i in range(n)]))
def lm(path):
    return TextDataLoaders.from_df(texts(16), is_lm=True, text_col='text', valid_pct=.2,
                                   seed=0, tok_tfm=BaseTokenizer(), bs=4, seq_len=24).train
def sorted_dl(path):
    return TextDataLoaders.from_df(texts(40), valid_pct=.2, seed=0, text_col='text',
                                   label_col='label', tok_tfm=BaseTokenizer(), bs=4, seq_len=24).train

points = lambda i: TensorPoint.create(torch.tensor([[i/30, .5]]), img_size=(30, 60))
kinds = dict(images=images, augmented=augmented, table=table, lm=lm, sorted=sorted_dl,
    pairs=lambda p: loader(), shuffled=lambda p: loader(shuffle=True, drop_last=True),
    dicts=lambda p: loader(lambda i: dict(x=torch.tensor([i]), y=dict(z=torch.tensor(i/3)))),
    lists=lambda p: loader(lambda i: [torch.tensor([i]), [torch.tensor(i), torch.tensor(i>3)]]),
    strings=lambda p: loader(lambda i: (torch.tensor([i]), f'item {i}')), single=lambda p: loader(lambda i: torch.tensor([i])),
    numbers=lambda p: loader(lambda i: (i, i/2)), arrays=lambda p: loader(lambda i: (np.full(3, i, dtype=np.float32), np.int64(i))),
    prebatched=lambda p: loader(lambda i: (torch.arange(i, i+5), torch.ones(i+1)), bs=None),
    points=lambda p: loader(points, cls=TfmdDL, num_workers=0), names=lambda p: loader(lambda i: f'item {i}'),
    draws=lambda p: loader(lambda i: (torch.rand(2), random.random(), np.random.rand())),
    halves=lambda p: loader(lambda i: (torch.tensor(i/7).half(), torch.tensor(i/7).bfloat16(), torch.tensor(i/7).double(),
                                       torch.tensor(i, dtype=torch.int8))),
    twice=lambda p: loader(lambda i: (torch.tensor(i),)*2, bs=None), stream=lambda p: DataLoader(Stream(22), bs=4, device=dev),
    tail=lambda p: loader(lambda i: torch.arange(12).view(3, 4).t() if i else torch.arange(3).expand(4, 3), bs=None),
    empty=lambda p: loader(n=0), one=lambda p: loader(n=1))

@pytest.fixture(scope='module')
def path(tmp_path_factory): return digits_path(tmp_path_factory.mktemp('digits'))

def batches(kind, path, read, n=2):
    "Batches of `n` passes, with the host's random numbers used between them, as a training does; and what the generators give after it"
    set_seed(5)
    manual_seed(5)
    dl = kinds[kind](path)
    dl.to(dev)
    res = []
    for _ in range(n):
        for b in read(dl): res.append((host(b), random.random(), np.random.rand(), torch.rand(1)))
    return res,(random.random(), np.random.rand(), torch.rand(1))

@pytest.mark.parametrize('kind', list(kinds))
def test_same_batches(kind, path):
    "Iterating gives fastai's own batches, and takes from the random generators what fastai takes"
    a,b = batches(kind, path, fastai_iter),batches(kind, path, iter)
    assert len(a[0]) >= {'empty': 0, 'one': 2, 'stream': 5}.get(kind, 6) and same(a, b)
    c = batches(kind, path, lambda dl: (b.batch() for b in feed(dl, group=3)))
    assert same(a, c)

@pytest.mark.parametrize('kind', ['images', 'dicts', 'strings', 'points', 'numbers', 'halves', 'tail'])
def test_raw(kind, path):
    "`raw` is what was collated, nothing widened, its tensors data on the device"
    dl = kinds[kind](path)
    dl.to(dev)
    dl.rng = random.Random(1)
    with count_xla() as c: raws = [b.raw for b in feed(dl)]
    assert (c.executions == 0
            and not any(torch_xla._XLAC._check_tensor_need_materialization([t for raw in raws for t in data._tensors(raw)])))
    assert all(map(is_xla, data._tensors(raws)))
    dl.rng = random.Random(1)
    dl._DataLoader__idxs = (dl.randomize(), dl.get_idxs())[1]
    cpu = list(dl.create_batches(dl.sample()))
    assert len(cpu) == len(raws) and all(map(same, cpu, map(fetch, raws)))
    if kind == 'images':
        assert raws[0][0].dtype == torch.uint8 and type(raws[0][0]) in (TensorImage, TensorImageBW) and raws[0][1].dtype == torch.int64

@pytest.mark.parametrize('workers', [1, 2])
def test_workers(workers):
    "With worker processes, which draw from generators of their own"
    def dl():
        return loader(lambda i: (torch.rand(2), torch.tensor(random.random()), torch.tensor(i)),
                      num_workers=workers, shuffle=True, pin_memory=True)
    def read(it):
        set_seed(7)
        d = dl()
        return [host(b) for b in it(d)],random.random(),torch.rand(1)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        a,b = read(fastai_iter),read(iter)
    assert len(a[0]) == 6 and same(a, b)

def test_no_device():
    "A dataloader without a device, or on another one, is fastai's"
    for d in (None, 'cpu'):
        dl = loader()
        dl.device = d
        assert iter(dl).gi_code is fastai_iter.__code__
        assert all(same(r.raw, b) and same(r.batch(), b) for r,b in zip(feed(dl), dl, strict=True))

class Doubled(DataLoader):
    def __iter__(self):
        for x,y in super().__iter__(): yield x*2,y

def test_own_iter():
    "A dataloader with an `__iter__` of its own is read by it, and nothing is read ahead"
    dl = loader(cls=Doubled)
    a = [host(b) for b in dl]
    assert a[1][0][0].tolist() == [8.]*3 and set(dl.dataset.by) == {'MainThread'}
    assert all(same(x, host(b.batch())) for x,b in zip(a, feed(dl), strict=True))

# who reads, and when

draws = dict(random=lambda i: random.random(), numpy=lambda i: np.random.rand(),
             torch=lambda i: torch.rand(1), shuffle=lambda i: random.sample(range(3), 2))

@pytest.mark.parametrize('kind', list(draws))
def test_drawing_stays(kind):
    "Items that draw random numbers are read by the training thread"
    dl = loader(draws[kind])
    list(dl)
    assert set(dl.dataset.by) == {'MainThread'}

def test_others_go():
    "Other items are read by a thread from the second batch on, those of `one_batch` are not"
    dl = loader()
    dl.one_batch()
    assert dl.dataset.by == ['MainThread']*4
    list(dl)
    assert dl.dataset.by == ['MainThread']*8 + ['fastai_xla feed']*18
    on_device = loader(lambda i: torch.ones(2, device=dev)*i)
    list(on_device)
    assert set(on_device.dataset.by) == {'MainThread'}

def test_draws_would_change(monkeypatch):
    "Were drawing items read ahead, the numbers would be others: the check is needed, and the tests see it"
    a = batches('draws', None, fastai_iter)
    monkeypatch.setattr(data, '_first', lambda dl, it, settings: (it, True))
    def slowly(dl):   # so that the thread is early
        for b in dl:
            time.sleep(.02)
            yield b
    assert not same(a, batches('draws', None, slowly))

def test_no_grad():
    "The thread computes gradients where the training thread would"
    w = torch.ones(2, requires_grad=True)
    with torch.no_grad(): assert len(list(loader(lambda i: w*i))) == 6
    assert len({t.requires_grad for t in loader(lambda i: w*i)}) == 1

class Gate:
    "Items as they are asked for, and which of them have come"
    def __init__(self): self.seen = [threading.Event() for _ in range(40)]
    def __call__(self, i):
        self.seen[i].set()
        return torch.tensor(i)

@pytest.mark.parametrize('group', [1, 2])
def test_two_ahead(group):
    "While a batch is in use, two more (or two groups) come, and no others"
    gate = Gate()
    it = feed(loader(gate, n=40, bs=4), group=group)
    for _ in range(group): next(it)
    assert not gate.seen[4*group].is_set()
    next(it)                                                    # the first that the thread has read
    assert all(e.wait(60) for e in gate.seen[:4*3*group+4*group])
    threading.Event().wait(.2)
    assert not any(e.is_set() for e in gate.seen[4*4*group:])
    it.close()

def test_step_and_loader_meet():
    "The next batch is fetched while the training thread is in its step: each waits for the other there"
    inside,fetched = threading.Event(),threading.Event()
    def make(i):
        if i == 8:
            assert inside.wait(60)
            fetched.set()
        return torch.tensor(i)
    for i,_ in enumerate(loader(make)):
        if i == 1:
            inside.set()
            assert fetched.wait(60)

# leaving early

def fails(i):
    if i == 13: raise LookupError('item 13 is lost')
    return torch.tensor(i)

@pytest.mark.parametrize('group', [1, 2, 4, 10])
@pytest.mark.parametrize('drawn', [False, True])
def test_exceptions(group, drawn):
    "What a dataset raises arrives as it was raised, after the batches before it; then the dataloader reads on"
    dl,seen = loader(lambda i: (fails(i), random.random() if drawn else 0)),[]
    for _ in range(2):
        with pytest.raises(LookupError, match='^item 13 is lost$') as e:
            for b in feed(dl, group): seen.append(b.raw[0].tolist()[0])
        assert 'fails' in [f.name for f in traceback.extract_tb(e.value.__traceback__)] and not feeders()
    assert seen == [0, 4, 8]*2
    dl.dataset.n = dl.n = 12
    assert len(list(dl)) == 3

def test_exceptions_of_collate():
    with pytest.raises(RuntimeError, match='Mismatch found on axis 0'): list(loader(lambda i: (torch.ones(1+i//10),)))
    with pytest.raises(LookupError, match='item 13 is lost'): list(loader(fails, num_workers=1))
    with pytest.raises(SystemExit): list(loader(lambda i: sys.exit(3) if i == 9 else i))
    dl = loader(after_batch=lambda b: 1/0)
    with pytest.raises(ZeroDivisionError): list(dl)

def test_timeout():
    with pytest.raises(RuntimeError, match='timed out after 1 seconds'):
        list(loader(lambda i: time.sleep(5*(i==9)) or i, num_workers=1, timeout=1))

def test_break():
    "`break`, a closed iterator, one that nobody holds, one in a cycle: the thread ends, and a new pass starts at the beginning"
    dl = loader()
    for i,_ in enumerate(dl):
        if i == 2: break
    assert not feeders()
    it = iter(dl)
    next(it),next(it)
    assert len(feeders()) == 1
    it.close()
    assert not feeders()
    it = iter(dl)
    next(it),next(it)
    del it
    assert not feeders()
    cycle = [iter(dl)]
    next(cycle[0]),next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert not feeders()
    assert [b[1].tolist()[0] for b in dl] == [0, 4, 8, 12, 16, 20]

def test_two_passes():
    "Two passes at once over the same dataloader, as `zip(dl, dl)` makes them"
    assert all(same(host(a), host(b)) for a,b in zip(*[iter(loader())]*1, iter(loader())))
    dl = loader()
    pairs = [(host(a), host(b)) for a,b in zip(dl, dl)]
    assert len(pairs) == 6 and all(same(a, b) for a,b in pairs)

def test_stream():
    "Of a stream nothing is read ahead: who reads on after a `break` misses nothing"
    dl = DataLoader(Stream(22), bs=4, device=dev)
    assert [first(dl).tolist()[0] for _ in range(3)] == [0, 4, 8]

class Stop(Callback):
    def __init__(self, exc): self.exc = exc
    def after_batch(self):
        if self.training and self.iter == 3: raise self.exc('stop')

@pytest.mark.parametrize('exc', [CancelEpochException, CancelTrainException, CancelFitException, KeyboardInterrupt, ValueError])
def test_cancelled_fit(exc):
    learn = image_learner().to_xla().remove_cb(ProgressCallback)
    with learn.no_logging():
        try: learn.fit(1, cbs=Stop(exc))
        except (KeyboardInterrupt, ValueError): pass
        assert not feeders()
        learn.fit(1)
    assert learn.train_iter == len(learn.dls.train)

def test_interrupt():
    "Ctrl-C while the training thread waits for a batch"
    go = threading.Event()
    dl = loader(lambda i: go.wait(60) if i == 8 else i)
    def press():
        _thread.interrupt_main()
        time.sleep(1.)
        go.set()
    timer = threading.Timer(.3, press)
    was = signal.signal(signal.SIGINT, signal.default_int_handler)   # a shell starts its background jobs with Ctrl-C ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            it = iter(dl)
            next(it),next(it)
            timer.start()
            next(it)
    finally: signal.signal(signal.SIGINT, was)
    timer.join()
    for _ in range(100):
        if feeders(): time.sleep(.1)   # at the batch that it was at
    assert not feeders() and len(list(loader())) == 6

def test_exit():
    "A process ends although an iterator is alive"
    code = '''
import torch
from fastai.data.load import DataLoader
from fastai_xla.all import *
import fastai_xla.data
it = iter(DataLoader(torch.arange(40.), bs=4, device=device()))
next(it),next(it)
print('done')
'''
    res = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=600)
    assert res.returncode == 0 and res.stdout.endswith('done\n') and 'Exception' not in res.stderr, res.stderr

# what travels

def sent_bytes(): return (met.metric_data('OutboundData') or (0, 0))[1]

def test_one_transfer():
    for group,n in ((1, 6), (2, 3), (4, 2), (10, 1)):
        dl = loader()
        with count_xla() as c: assert len(list(feed(dl, group))) == 6
        assert (c.to_device, c.executions, c.to_host, c.compiles) == (n, 0, 0, 0)
    dl = loader(lambda i: (torch.rand(3), i))
    with count_xla() as c: assert len(list(feed(dl, 3))) == 6
    assert c.to_device == 6                                   # where items draw, each batch has its time

def test_bytes():
    "Images travel as bytes and become floats, normalised, on the device; labels become one-hot there"
    n,size = 64,32
    x = TensorImage(torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8))
    def one_hot(y:TensorCategory): return F.one_hot(y.as_subclass(Tensor), 10).float()
    tfms = [IntToFloatTensor(), Normalize.from_stats(*imagenet_stats, cuda=False), Transform(one_hot, order=100)]
    dl = TfmdDL(Items(n, lambda i: (x[i], TensorCategory(i%10))), bs=16, after_batch=tfms, num_workers=0, device=dev)
    batches_read,before = [],sent_bytes()
    for b in feed(dl): batches_read.append(b)
    ratio = (sent_bytes()-before)/(n*3*size*size*4)
    print(f'{ratio:.4f} of the bytes of fp32')
    assert .25 < ratio <= .26
    with count_xla() as c:
        got = [b.batch() for b in batches_read]
        assert all(is_xla(t) and t.dtype == torch.float32 for b in got for t in b)
        sync()
    assert c.executions == 1 and c.to_host == 0 and not c.fallbacks
    mean,std = (torch.tensor(o, dtype=torch.float64)[:,None,None] for o in imagenet_stats)
    got = [fetch(b) for b in got]
    assert (torch.cat([b[0] for b in got]).double() - (x.double()/255-mean)/std).abs().max() < 1e-5
    assert torch.equal(torch.cat([b[1] for b in got]), torch.eye(10)[torch.arange(n)%10])

def test_changed_in_place(monkeypatch):
    """A batch that a transform changes in place makes one graph, however long ago it was sent

    Had it been sent as a view, it would make another"""
    w = send([torch.ones(4, 3, 8, 8)], dev)[0]
    x = TensorImage(torch.rand(32, 3, 8, 8))
    sync()
    def compiles(batches_read):
        with count_xla() as c:
            for b in batches_read:
                w.sub_((b.batch()[0].as_subclass(Tensor)*w).sum()*1e-3)
                sync()
        return c.compiles
    # `o.float().div_(255)`, and `x` is float
    dl = TfmdDL(Items(32, lambda i: (x[i], TensorCategory(i%4))), bs=4, after_batch=[IntToFloatTensor()], num_workers=0, device=dev)
    assert compiles(feed(dl)) == 1
    early = list(feed(dl))
    assert compiles(early) == 0
    assert all(torch.allclose(fetch(b.raw[0]).as_subclass(Tensor), x[i*4:i*4+4].as_subclass(Tensor)/255) for i,b in enumerate(early))
    monkeypatch.setattr(transfer, '_retyped', transfer._as_type_of)
    assert compiles(list(feed(dl))) > 0

def test_without_private_name(monkeypatch):
    "A torch_xla without the call that sends many tensors: as many transfers as tensors, the same batches"
    a = batches('pairs', None, fastai_iter)
    names = vars(transfer._XLAC)
    bare = SimpleNamespace(**{n: f for n,f in names.items() if n != '_xla_tensors_from_aten'})
    monkeypatch.setattr(transfer, '_XLAC', bare)
    assert same(a, batches('pairs', None, iter))

# in training

@contextmanager
def stock():
    "Within the block, fastai reads its batches itself"
    ours = DataLoader.__iter__
    DataLoader.__iter__ = fastai_iter
    try: yield
    finally: DataLoader.__iter__ = ours

def test_contract():
    "One execution per batch and nothing to the host; one transfer for a batch's images and labels, where `.to` needs two for each"
    def run():
        set_seed(0)
        learn = image_learner(cbs=Probe(), opt_func=SGD).to_xla(replay=False).remove_cb(ProgressCallback)
        with learn.no_logging(): learn.fit(3)
        return learn
    learn = run()
    with stock(): other = run()
    for training in (True, False):
        assert not breaches(learn.probe.steady(training))
        assert all(c.to_host == 0 for c in learn.probe.steady(training))
    with count_xla() as a, learn.no_logging(): learn.fit(1)
    with stock(), count_xla() as b, other.no_logging(): other.fit(1)
    assert b.to_device - a.to_device == (4-1)*(len(learn.dls.train) + len(learn.dls.valid))
    assert learn.recorder.losses == other.recorder.losses

def test_stress():
    "200 batches sent while the training thread traces, runs and frees: losses, weights and every batch are those of a run without a thread"
    def run():
        set_seed(3)
        sums = []
        class Sums(Callback):
            def after_batch(self):
                if self.training: sums.append(((self.x*torch.arange(64., device=dev).view(8, 8)).sum(), self.y.sum()))
        learn = image_learner(image_dls(n=200*16, n_valid=64), cbs=Sums()).to_xla(replay=False).remove_cb(ProgressCallback)
        with learn.no_logging(): learn.fit(1, 1e-2)
        return torch.stack(learn.recorder.losses),fetch(sums),fetch(learn.model.state_dict())
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)                                # the threads change as often as can be
    try: a = run()
    finally: sys.setswitchinterval(switch)
    with stock(): b = run()
    assert len(a[0]) == 200 and same(a, b)

# a dataset that the training changes

class Scaled:
    "Items of which each is `scale`; they note who read them"
    def __init__(self, n=32): self.scale,self.n,self.by = 1.,n,[]
    def __len__(self): return self.n
    def __getitem__(self, i):
        self.by.append(threading.current_thread().name[:11])
        return torch.tensor(self.scale)

def passes(change, n=3):
    "What each batch of `n` passes holds, where `change(dataset, i)` is called after batch i"
    dl,res = DataLoader(Scaled(), bs=4, device=device(), num_workers=0),[]
    for _ in range(n):
        dl.dataset.scale = 1.
        res.append([])
        for i,b in enumerate(dl):
            res[-1].append(fetch(b)[0].item())
            change(dl.dataset, i)
            n = -1
            while n != len(dl.dataset.by):   # until the thread is done with what it may read ahead
                n = len(dl.dataset.by)
                time.sleep(.03)
    return res,Counter(dl.dataset.by)

def test_dataset_changed_between_batches_is_told_and_then_right():
    def change(d, i): d.scale += 1 if i == 3 else 0
    with pytest.warns(UserWarning, match='`scale`, which the items .* has been changed while batches were read ahead: up to 2') as told:
        found,by = passes(change)
    right = [1.]*4 + [2.]*4
    assert len([w for w in told if 'read ahead' in str(w.message)]) == 1
    late = [[1.]*n + [2.]*(8-n) for n in (4, 5, 6)]   # as far as the other thread has read by then
    assert found[0] in late and found[1:] == [right]*2   # plain fastai gives `right` in each pass
    assert by['fastai_xla '] == 5*4

def test_dataset_changed_between_passes_is_read_ahead():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        found,by = passes(lambda d, i: None)
    assert found == [[1.]*8]*3 and by['fastai_xla '] == 3*7*4

def test_dataset_that_counts_its_items_is_read_in_turn():
    class Counts(Scaled):
        def __getitem__(self, i):
            self.n_read = getattr(self, 'n_read', 0)+1
            return super().__getitem__(i)
    dl = DataLoader(Counts(), bs=4, device=device(), num_workers=0)
    assert [dl.dataset.n_read for _ in dl] == [4*(i+1) for i in range(8)]

def test_settings_are_found_without_a_look_at_the_items():
    "A `TfmdLists` is a list that runs its transforms"
    tls = TfmdLists(range(40), lambda i: torch.ones(2)*random.random())
    for workers in (0, 1):
        dl = tls.dataloaders(bs=8, num_workers=workers, device=device()).train
        random.seed(0)
        data._Settings(dl), data._holds_xla(dl.dataset)
        state = random.getstate()
        random.seed(0)
        assert random.getstate() == state

def tiny_images(path, n=20):
    for i in range(n): PILImage.create((np.random.rand(8+i%3, 8, 3)*255).astype('uint8')).save(path/f'{"ab"[i%2]}_{i}.png')
    return path

def test_validation_of_stock_images_is_read_ahead_without_a_warning(tmp_path):
    "A pass tells the transforms their `split_idx` as it starts, which is no change of the training's"
    block = DataBlock((ImageBlock, CategoryBlock), get_items=get_image_files, get_y=lambda f: f.name[0], splitter=IndexSplitter(range(12)),
                      item_tfms=Resize(8))
    dls = block.dataloaders(tiny_images(tmp_path), bs=2, num_workers=0, device=device())
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*read ahead')
        for _ in range(2): list(dls.valid)
    assert dls.valid not in data.changed_items

class Hits(Scaled):
    "Counts what it finds in its cache; the first batches are not there"
    def __init__(self):
        super().__init__()
        self.cache,self.hits = {9: 1., 20: 1.},0
    def __getitem__(self, i): return self.get(i)
    def get(self, i):
        if i in self.cache: self.hits += 1
        return super().__getitem__(i)

def test_a_vocabulary_that_is_asked_for_an_unknown_word_is_no_change():
    "fastai's `Numericalize` looks words up in a `defaultdict`, to which a look at what it has not adds a 0"
    texts = [['a', 'b', 'a', 'b'] for _ in range(20)] + [['a', str(i), 'b', 'a'] for i in range(20)]
    def dl(o2i):
        num = Numericalize(vocab=['xxunk', 'a', 'b'])
        num.o2i = o2i(num.o2i)
        return TfmdDL(TfmdLists(texts, num), bs=4, device=device(), num_workers=0)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*read ahead')
        stock = dl(lambda d: d)
        list(stock)
    assert stock not in data.changed_items and len(stock.dataset.tfms[0].o2i) > 20
    changed = dl(lambda d: collections.defaultdict(int, d))
    for i,_ in enumerate(changed):
        if i == 1: changed.dataset.tfms[0].o2i['a'] = 7
    assert changed in data.changed_items

def test_what_a_dataset_counts_itself_is_no_change_of_the_trainings():
    dl = DataLoader(Hits(), bs=4, device=device(), num_workers=0)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*read ahead')
        for _ in range(2): list(dl)
    assert dl.dataset.hits == 4 and dl in data.changed_items   # read in turn from now on

def test_nothing_is_read_while_a_step_is_traced(monkeypatch):
    "A trace shows other numbers, and holds all objects there are for a moment: a thread beside it has died of that"
    from fastai_xla.capture.step import Trace
    init,tracing,seen = Trace.__init__,[],[]
    def traced(self, *args, **kwargs):
        tracing.append(1)
        time.sleep(.05)
        try: init(self, *args, **kwargs)
        finally: tracing.pop()
    class Items:
        def __len__(self): return 32
        def __getitem__(self, i):
            seen.append(bool(tracing))
            return torch.ones(4), torch.tensor(i%2)
    monkeypatch.setattr(Trace, '__init__', traced)
    dls = DataLoaders(*(DataLoader(Items(), bs=4, num_workers=0) for _ in range(2)))
    learn = Learner(dls, nn.Linear(4, 2), loss_func=CrossEntropyLossFlat()).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    assert len(seen) > 64 and not any(seen)

class Changing:
    "What a training may change between two batches"
    def __init__(self, n, by):
        self.x,self.y = torch.randn(n, 6, generator=torch.Generator().manual_seed(n)),np.zeros(n)
        self.kept,self.by = collections.deque(maxlen=9),by
    def __len__(self): return len(self.x)
    def __getitem__(self, i):
        more = self.kept[-1-i%len(self.kept)] if self.kept else 0
        return self.x[i]*self.by['scale'],torch.tensor([float(self.y[i]) + more])

class Corrects(Callback):
    "Targets of the next batch become what the model makes of them"
    def after_batch(self):
        ds,i = self.dls.train.dataset,(self.iter+1)*8
        if self.training: ds.y[i:i+8] = self.model(ds.x[i:i+8].to(self.x.device)).detach().cpu().numpy()[:,0]

class Feeds(Callback):
    "A buffer of what was seen"
    def after_batch(self): self.dls.train.dataset.kept.append(self.train_iter/10)

class Schedules(Callback):
    "Items are more difficult from batch to batch"
    def __init__(self, by): self.by = by
    def after_step(self): self.by['scale'] += .1

@pytest.mark.parametrize('make', [lambda by: Corrects(), lambda by: Feeds(), Schedules], ids=['targets', 'buffer', 'schedule'])
def test_items_that_a_callback_changes_from_batch_to_batch(make):
    def fit(replay):
        torch.manual_seed(0)
        by = dict(scale=1.)
        dls = DataLoaders(DataLoader(Changing(64, by), bs=8), DataLoader(Changing(16, by), bs=8))
        learn = Learner(dls, nn.Linear(6, 1), loss_func=nn.MSELoss(), opt_func=SGD, cbs=make(by))
        if replay is not None: learn.to_xla(replay=replay)
        with learn.no_bar(), learn.no_logging(): learn.fit(3, .1)
        return [*map(float, learn.recorder.losses), *learn.model.weight.detach().cpu()[0].tolist()]
    cpu = fit(None)
    for replay in (False, 'auto'): test_close(fit(replay), cpu, eps=1e-4)

class DrawsInSome:
    "Draws only in later batches of a pass"
    def __len__(self): return 32
    def __getitem__(self, i):
        noise = torch.randn(2) if i%12 == 11 else 0
        return torch.full((2,), i/32.)+noise,torch.rand(1) if i == 30 else torch.ones(1)

class DrawsInSteps(Callback):
    def __init__(self): self.drawn = []
    def after_batch(self): self.drawn.append(float(torch.rand(())))

def test_dataset_that_draws_only_in_some_batches():
    def trained(xla):
        dls = DataLoaders(*(TfmdDL(DrawsInSome(), bs=4, num_workers=0) for _ in range(2)))
        torch.manual_seed(1)
        cb = DrawsInSteps()
        learn = Learner(dls, nn.Linear(2, 1), loss_func=nn.MSELoss(), opt_func=SGD, cbs=cb)
        if xla: learn.to_xla()
        with learn.no_bar(), learn.no_logging(): learn.fit(2, .1)
        return cb.drawn,fetch(learn.model.state_dict()),learn.recorder.losses
    right = trained(False)
    drawn,weights,losses = trained(True)
    assert drawn == right[0]
    for a,b in zip(weights.values(), right[1].values()): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    test_close(losses, right[2], 1e-5)
