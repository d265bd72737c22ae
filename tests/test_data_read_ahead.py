"Batches are read ahead where that changes no number, and nothing is left behind"
import _thread, gc, random, signal, subprocess, sys, threading, time, traceback
import pytest
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.data import *
from common import image_learner
from feeding import *

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

def test_cancelled_fit():
    learn,held = image_learner().to_xla().remove_cb(ProgressCallback),[]
    for exc in (CancelEpochException, CancelTrainException, CancelFitException, KeyboardInterrupt, ValueError):
        with learn.no_logging():
            try: learn.fit(1, cbs=Stop(exc))
            except (KeyboardInterrupt, ValueError) as e: held.append(e)   # and with it the frames of the loop
            assert not feeders(), exc
            learn.fit(1)
        assert learn.train_iter == len(learn.dls.train), exc

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
