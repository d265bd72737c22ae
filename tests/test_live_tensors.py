"Tensors that are alive are looked up, while garbage is collected and while threads build tuples"
import gc, sys, threading
from contextlib import nullcontext
import torch
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.capture import alive
from common import *

def test_scan_where_garbage_is_collected(monkeypatch, capfd):
    "Tensors that only C++ holds do not die while the scan looks at them"
    def forgotten():
        learn = image_learner().remove_cb(ProgressCallback).to_xla()
        with learn.no_logging(): learn.fit(1)
    gc.collect()
    gc.disable()
    try:
        forgotten()
        looked,is_xla = [],alive.is_xla
        def collecting(t):
            if not looked: gc.collect()
            looked.append(t)
            return is_xla(t)
        monkeypatch.setattr(alive, 'is_xla', collecting)
        alive.live_tensors([])
    finally: gc.enable()
    assert len(looked) > 10 and 'live PyObject references' not in capfd.readouterr().err

def scans(n=20):
    "What threads that build tuples run into while tensors are looked up"
    errors,over,junk = [],threading.Event(),[[i] for i in range(200_000)]
    def build():
        while not over.is_set():
            try: tuple(torch.zeros(1) if i%50 == 0 else i for i in range(200))
            except SystemError as e: errors.append(e)
    threads = [threading.Thread(target=build) for _ in range(2)]
    for t in threads: t.start()
    for _ in range(n): alive.all_tensors()
    over.set()
    for t in threads: t.join()
    return errors

def test_threads_build_tuples_while_tensors_are_looked_up(monkeypatch):
    "A thread that builds a tuple must be the only one to hold it, and a list of all objects does"
    was = sys.getswitchinterval()
    assert not scans() and sys.getswitchinterval() == was
    monkeypatch.setattr(alive, '_alone', nullcontext)
    assert any(scans() for _ in range(5))
