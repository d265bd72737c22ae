"""Each notebook is a test, in a process of its own: what one patches or compiles does not reach the next

The processes are forked from one that has imported what is slow to import, but neither fastai, which patches tensors, nor fastai_xla.
A cell may take as long as it takes.

    make test ARGS='-k runtime'                # some of them
    NB_FLAGS='tpu slow' make test              # with the cells marked `#| tpu` and `#| slow`"""
import multiprocessing, os
from multiprocessing import forkserver
from pathlib import Path
import pytest
from nbdev.config import get_config
from nbdev.doclinks import nbglob

root = Path(__file__).resolve().parent.parent
nbs = get_config(root).nbs_path
if not nbs.exists(): pytest.skip('the notebooks are in the repository, not in the sdist', allow_module_level=True)
slow_imports = ['torch_xla', 'torchvision', 'timm', 'sklearn.datasets', 'pandas', 'matplotlib.pyplot', 'fasthtml.basics', 'fasttransform',
    'execnb.shell', 'nbdev.test', 'pytest']
# The tutorials run as users run them; the others compile more than they run, and do it as other tests do,
# and so do some of the tutorials
short_tutorials = ('04_where_backends_part', '06_why_slow', '09_more_than_one_core', '10_images', '11_segmentation', '12_tabular',
    '14_text')

@pytest.fixture(scope='module')
def forked():
    processes = multiprocessing.get_context('forkserver')
    processes.set_forkserver_preload(slow_imports)
    with pytest.MonkeyPatch.context() as m:
        m.delenv('XLA_FLAGS', raising=False)
        forkserver.ensure_running()
    return processes

def run(nb, log, flags):
    "In the new process"
    with open(log, 'w') as f:
        for fd in (1, 2): os.dup2(f.fileno(), fd)
    os.chdir(root)
    multiprocessing.set_start_method(None, force=True)   # that of dataloaders, which is now 'forkserver'
    if flags: os.environ['XLA_FLAGS'] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    from nbdev.test import nbdev_test
    nbdev_test.__wrapped__(str(nb), flags=os.environ.get('NB_FLAGS', ''), n_workers=0, cell_timeout=0)

@pytest.mark.parametrize('nb', sorted(nbglob(nbs, as_path=True)), ids=lambda o: str(o.relative_to(nbs)))
def test_notebook(nb, forked, tmp_path):
    log = tmp_path/'log.txt'
    short = nb.parent.name in ('api', 'howto', 'explanations') or nb.stem in short_tutorials
    process = forked.Process(target=run, args=(nb, log, os.environ.get('XLA_FLAGS') if short else None))
    process.start()
    process.join()
    assert process.exitcode == 0, f'return code {process.exitcode}\n{log.read_text() if log.exists() else ""}'
