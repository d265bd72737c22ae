import os
import pytest
os.environ.setdefault('PJRT_DEVICE', 'CPU')
os.environ.setdefault('MPLBACKEND', 'agg')
# two processes run side by side, and threads of theirs that wait for each other take the cores
os.environ.setdefault('OMP_NUM_THREADS', '1')
# short compiles; nothing here is timed
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true')
# of some thousand graphs in one process, the later ones would find no address space
os.environ.setdefault('XLA_COMPILATION_CACHE_SIZE', '128')

def pytest_pycollect_makeitem(collector, name, obj):
    "fastai's star imports bring functions called `test_eq` and the like: only a module's own functions are tests"
    if getattr(obj, '__module__', collector.module.__name__) != collector.module.__name__: return []

@pytest.fixture
def without_audits(monkeypatch):
    "Guards alone: an audit would find what one of them misses"
    from fastai_xla.replay import Replay
    monkeypatch.setattr(Replay, '_audit_due', lambda self, rec: False)
