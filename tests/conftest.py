import gc, os
from itertools import chain
from types import SimpleNamespace
import pytest
os.environ.setdefault('PJRT_DEVICE', 'CPU')
os.environ.setdefault('MPLBACKEND', 'agg')
# two processes run side by side, and threads of theirs that wait for each other take the cores
os.environ.setdefault('OMP_NUM_THREADS', '1')
# compiles in a fifth of the time, half of that by the last two; nothing here is timed
quick_compiles = ('--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false '
    '--xla_cpu_parallel_codegen_split_count=1')
os.environ.setdefault('XLA_FLAGS', quick_compiles)
# of some thousand graphs in one process, the later ones would find no address space
os.environ.setdefault('XLA_COMPILATION_CACHE_SIZE', '128')

# an `assert` of theirs that fails says what it has compared, as those of the tests do
pytest.register_assert_rewrite('as_one', 'by_log', 'changes', 'feeding', 'norms', 'on_both', 'order_of_steps', 'unheard')

def pytest_configure(config):
    """What the imports have made, some 600,000 objects, stays frozen

    A fit looks through all objects several times, to find tensors and what a step has made, which is half the time of a small fit.
    The package unfreezes all after each look; so here, what a step has made is what is young while nothing is collected.
    Notebooks, and tests in processes of their own, leave this to the package"""
    if config.getoption('numprocesses', None): return   # its workers do
    import fastai.collab, fastai.tabular.all, fastai.text.all, fastai.vision.all, fastai_xla.all
    from fastai_xla.capture import effects
    was = []
    def freeze():
        was.append(gc.isenabled())
        gc.disable()
        gc.collect(1)   # leaves nothing young
    def unfreeze():
        if was.pop(): gc.enable()
    effects.gc = SimpleNamespace(freeze=freeze, unfreeze=unfreeze)
    effects._ids = lambda: set(map(id, chain.from_iterable(map(gc.get_objects, (0,)))))   # in one call of C, as there
    gc.collect()
    gc.freeze()

@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """A learner that is done with goes, and what a module and its imports leave is frozen too

    With the tensors of fifty learners alive, torch_xla took 2 ms more for each graph, and with 100,000 objects more, small fits took
    half as long again"""
    res = yield
    gc.collect()
    if nextitem is None or nextitem.module is not item.module: gc.freeze()
    return res

def pytest_collection_modifyitems(items):
    "What takes a minute comes first, or one process would end with it while the other has nothing left to do"
    items.sort(key=lambda item: item.path.stem != 'test_notebooks')

def pytest_pycollect_makeitem(collector, name, obj):
    "fastai's star imports bring functions called `test_eq` and the like: only a module's own functions are tests"
    if getattr(obj, '__module__', collector.module.__name__) != collector.module.__name__: return []

@pytest.fixture
def without_audits(monkeypatch):
    "Guards alone: an audit would find what one of them misses"
    from fastai_xla.replay import Replay
    monkeypatch.setattr(Replay, '_audit_due', lambda self, rec: False)

@pytest.fixture
def recorded(monkeypatch):
    "Steps with code of the user's are recorded too, as several steps in one execution and those on several devices are"
    from fastai_xla.replay import Replay
    monkeypatch.setattr(Replay, 'log_of', lambda self: None)
