"Threads that were there before the fit, files named as modules of Python's, and objects that callbacks hold: as fastai on the CPU"
import importlib, pytest, queue, sys, threading, time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from fastai.vision.all import *
from fastai_xla.all import *
from test_carried import Seeing, check, mlp

class Queue:
    "Values on their way to a thread that waits for them"
    def __init__(self, read):
        self.q = queue.Queue()
        def work():
            while True:
                o = self.q.get()
                with suppress(Exception): read(o)   # what is not read is missed later
                self.q.task_done()
        threading.Thread(target=work, daemon=True).start()
    def put(self, o): self.q.put(o)
    def join(self): self.q.join()

class Deque:
    "The same, and the thread asks time and again"
    def __init__(self, read):
        self.q,self.over = deque(),False
        def work():
            while self.q or not self.over: read(self.q.popleft()) if self.q else time.sleep(1e-4)
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
    def put(self, o): self.q.append(o)
    def join(self):
        self.over = True
        self.thread.join()

class Pool:
    def __init__(self, read): self.pool,self.read = ThreadPool(1),read
    def put(self, o): self.pool.apply_async(self.read, (o,))
    def join(self):
        self.pool.close()
        self.pool.join()

ways = dict(loss=lambda cb: cb.learn.loss, preds=lambda cb: cb.learn.pred.detach(), twice=lambda cb: cb.learn.loss.detach()*2)

@pytest.mark.parametrize('kind,way', [*((Queue, way) for way in ways), (Deque, 'loss'), (Pool, 'twice')])
def test_a_thread_reads_within_the_step(kind, way):
    "It waits until the value is there"
    class Send(Seeing):
        def __init__(self):
            super().__init__()
            self.out = kind(lambda t: self.seen.append((t.cpu()+1).mean().item()))   # on the CPU: torch_xla computes in one thread
        def after_loss(self):
            self.out.put(ways[way](self))
            time.sleep(.002)   # the thread is first
        def after_fit(self): self.out.join()
    check(Send)

def test_a_step_hands_work_to_an_executor_once():
    class Send(Seeing):
        def __init__(self):
            super().__init__()
            self.pool = ThreadPoolExecutor(1)
        def after_loss(self): self.pool.submit(self.seen.append, self.train_iter)
        def after_fit(self): self.pool.shutdown()
    assert 'hands work to another thread' in check(Send, replayed=False)[0]

def test_the_step_waits_for_the_thread():
    class Send(Seeing):
        def __init__(self):
            super().__init__()
            self.out = Queue(lambda t: self.seen.append(float(t)))
        def after_loss(self):
            self.out.put(self.learn.loss)
            self.out.join()
    assert 'waits for another thread' in check(Send, replayed=False)[0]

def test_a_thread_reads_between_steps():
    class Send(Seeing):
        def __init__(self):
            super().__init__()
            self.out = Queue(lambda t: self.seen.append(float(t)))
        def after_loss(self): self.learn.loss_grad = self.loss_grad*(1+self.pct_train)
        def after_batch(self):
            if self.training: self.out.put(self.learn.loss)
        def after_fit(self): self.out.join()
    check(Send)

def test_a_thread_that_the_step_waits_for_is_told(monkeypatch):
    "It holds a lock, for which the step waits"
    monkeypatch.setattr('fastai_xla.capture.waiting._longest', .2)
    said = []
    class Send(Seeing):
        def __init__(self):
            super().__init__()
            self.lock,self.out = threading.Lock(),Queue(self.read)
        def read(self, t):
            try:
                with self.lock: float(t)
            except RuntimeError as e: said.append(str(e))
        def after_loss(self):
            self.out.put(self.learn.loss)
            time.sleep(.01)
            with self.lock: pass
        def after_fit(self): self.out.q.join()
    check(Send)
    assert said and all('the step waits for that thread' in s for s in said)

def fit(cbs, replay, metrics=None, opt=SGD, model=mlp, n=2):
    "A fit in whose step no code is the user's but that of `cbs`: the recorder's losses, metrics, and weights; why steps were not replayed"
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    ds = list(zip(x, (x[:,0] > 0).long()))
    dls = DataLoaders.from_dsets(ds, ds[:16], bs=8, num_workers=0, shuffle=False)
    learn = Learner(dls, model(), loss_func=nn.CrossEntropyLoss(), opt_func=opt, cbs=cbs(), metrics=metrics)
    if replay is not None: learn.to_xla(replay=replay)
    with learn.no_bar(), learn.no_logging(): learn.fit(n, .1)
    sd = [t.detach().cpu().float() for t in learn.model.state_dict().values()]
    return [float(l) for l in learn.recorder.losses],learn.recorder.values,sd,[*learn.xla_opt.replay.fit.plain] if replay else []

def same(cbs, **kwargs):
    "Replayed as retraced, and as fastai on the CPU"
    cpu,plain,auto = (fit(cbs, r, **kwargs) for r in (None, False, 'auto'))
    for want,eps in ((plain, 1e-6), (cpu, 1e-4)):
        for a,b in zip(auto[:3], want[:3]): test_close(a, b, eps=eps)
    return auto[3]

_file = '''
from fastai.callback.core import Callback
calls = []
class Weigh(Callback):
    def before_fit(self): calls.clear()
    def after_loss(self):
        calls.append(0)
        self.learn.loss_grad = self.loss_grad/len(calls)
'''

def test_a_file_of_the_users_has_the_name_of_one_of_pythons(tmp_path, monkeypatch):
    (tmp_path/'statistics.py').write_text(_file)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'statistics', raising=False)
    Weigh = importlib.import_module('statistics').Weigh
    assert not same(lambda: [Weigh()])
    monkeypatch.delitem(sys.modules, 'statistics')

class Ends:
    "A helper whose method ends the training of an epoch"
    how = CancelTrainException
    def __init__(self): self.n,self.kept = 0,CancelTrainException()
    def by_name(self, learn):
        self.n += 1
        if self.n % 7 == 0: raise CancelTrainException()
    def kept_one(self, learn):
        self.n += 1
        if self.n % 7 == 0: raise self.kept
    def of_the_class(self, learn):
        self.n += 1
        if self.n % 7 == 0: raise self.how

@pytest.mark.parametrize('way,own', [('by_name', False), ('kept_one', False), ('of_the_class', False), ('kept_one', True)])
def test_a_helper_ends_a_batch_and_the_epoch(way, own):
    "The recorder does not hear of it"
    class Looks(Callback):
        order = -5
        def __init__(self): self.helper = Ends()
    Looks.after_batch = dict(by_name=lambda cb: cb.training and cb.helper.by_name(cb.learn),
                             kept_one=lambda cb: cb.training and cb.helper.kept_one(cb.learn),
                             of_the_class=lambda cb: cb.training and cb.helper.of_the_class(cb.learn))[way]
    class Own(Callback):
        def after_loss(self): self.learn.loss_grad = self.loss_grad*(1+self.pct_train)
    same(lambda: [Looks()] + [Own()]*own, metrics=accuracy)

class Norms:
    "A helper whose method reads gradients"
    def __init__(self): self.seen = []
    def look(self, learn): self.seen.append(sum(-1. if p.grad is None else p.grad.abs().sum().detach() for p in learn.model.parameters()))
norms = Norms()

def test_a_helper_reads_gradients():
    "Before the backward pass they are zeros, as on the CPU"
    def own(cb): cb.norms.look(cb.learn)
    def named(cb): norms.look(cb.learn)
    def seen(held, replay):
        class Looks(Callback):
            def before_fit(self):
                norms.seen.clear()
                if held: self.norms = norms
            def after_batch(self): pass
        Looks.after_pred = own if held else named
        fit(lambda: [Looks()], replay)
        return [float(v) for v in norms.seen]
    want = seen(True, None)
    for held in (True, False):
        for replay in (False, 'auto'): test_close(seen(held, replay), want, eps=1e-4)

class Own(Callback):
    "With it the user's code runs at every step"
    def after_loss(self): self.learn.loss_grad = self.loss_grad*(1+self.pct_train)

@pytest.mark.parametrize('own', [False, True])
@pytest.mark.filterwarnings('ignore')
def test_a_tensor_in_a_partial_is_changed_between_batches(own):
    t = torch.tensor(1.)
    class Less(Callback):
        def before_fit(self): t.fill_(1.)
        def after_batch(self):
            if self.training: t.mul_(.9)
    why = same(lambda: [Less()] + [Own()]*own, model=lambda: nn.Sequential(mlp(), Lambda(partial(torch.mul, other=t))))
    assert not (own and why)

class Spectrum(nn.Module):
    def forward(self, x): return torch.fft.irfft(torch.fft.rfft(x))

def test_there_and_back_by_a_spectrum():
    assert not same(list, model=lambda: nn.Sequential(nn.Linear(6, 6), Spectrum(), nn.Linear(6, 2)))

@pytest.mark.parametrize('own', [False, True])
def test_a_tensor_of_the_cpu_in_the_place_of_a_buffer(own):
    class Sets(Callback):
        def after_batch(self):
            if self.training and self.train_iter in (3, 9): self.model[1].num_batches_tracked = torch.tensor(5)
    same(lambda: [Sets()] + [Own()]*own, model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))

@pytest.mark.parametrize('own', [False, True])
def test_a_thread_reads_all_the_time(own):
    "Recordings and audits do not take its reads for the step's"
    t,over,read = torch.ones(2, device=device()),threading.Event(),[]
    sync()
    def work():
        while not over.is_set(): read.append(t.cpu().sum().item())
    thread = threading.Thread(target=work)
    thread.start()
    try: assert not same(lambda: [Own()]*own)
    finally:
        over.set()
        thread.join()
    assert set(read) == {2.} and len(read) > 20, len(read)
