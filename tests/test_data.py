"Batches on their way to the device: the same as fastai's, one transfer each"
import random, sys, time
from contextlib import contextmanager
from types import SimpleNamespace
from pydoc_data.topics import topics
import pytest, torch_xla, torch_xla.debug.metrics as met
from fastai.vision.all import *
from fastai.tabular.all import *
from fastai.text.all import *
import fastai_xla.data as data, fastai_xla.transfer as transfer
from fastai_xla.all import *
from fastai_xla.data import *
from fastai_xla.runtime import *
from fastai_xla.transfer import *
from fastai_xla.cli import digits_path, digits_dls
from common import image_dls, image_learner
from probe import *
from feeding import *

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

def test_draws_would_change(monkeypatch):
    "Were drawing items read ahead, the numbers would be others: the check is needed, and the tests see it"
    a = batches('draws', None, fastai_iter)
    monkeypatch.setattr(data, '_first', lambda dl, it, settings: (it, True))
    def slowly(dl):   # so that the thread is early
        for b in dl:
            time.sleep(.02)
            yield b
    assert not same(a, batches('draws', None, slowly))

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
    "80 batches sent while the training thread traces, runs and frees: losses, weights and every batch are those of a run without a thread"
    def run():
        set_seed(3)
        sums = []
        class Sums(Callback):
            def after_batch(self):
                if self.training: sums.append(((self.x*torch.arange(64., device=dev).view(8, 8)).sum(), self.y.sum()))
        learn = image_learner(image_dls(n=80*16, n_valid=64), cbs=Sums()).to_xla(replay=False).remove_cb(ProgressCallback)
        with learn.no_logging(): learn.fit(1, 1e-2)
        return torch.stack(learn.recorder.losses),fetch(sums),fetch(learn.model.state_dict())
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)                                # the threads change as often as can be
    try: a = run()
    finally: sys.setswitchinterval(switch)
    with stock(): b = run()
    assert len(a[0]) == 80 and same(a, b)
