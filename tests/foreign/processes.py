"Runs of a notebook, each in a process of its own that is forked from one which has imported fastai"
import json, os, signal, sys, tempfile, time, traceback
from pathlib import Path
from ..conftest import quick_compiles
from . import child
from .notebooks import is_export

start_seconds = 240   # Until the first cell: imports, the recipe's setup

def environment():
    "Before fastai is imported"
    os.environ.update(PJRT_DEVICE='CPU', MPLBACKEND='agg', IN_TEST='1', HF_HUB_OFFLINE='1', XLA_FLAGS=quick_compiles)

def _work_folder(folder, notebooks):
    "Where cells run: an empty folder with links to what lies beside the notebooks"
    work = folder/'work'
    work.mkdir()
    for f in notebooks.iterdir():
        if f.suffix != '.ipynb': (work/f.name).symlink_to(f.resolve())
    return work

def _forked(job, folder, notebooks):
    "Start a process for `job`; its id"
    work = _work_folder(folder, notebooks)
    if pid := os.fork(): return pid
    code = 1
    try:
        os.setsid()
        log = os.open(folder/'log.txt', os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(work)
        os.environ['FASTAI_HOME'] = str(folder/'home')
        child.main(job)
        code = 0
    except BaseException: traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)   # without what threads and handlers would do at the end

def _ended(pid, status):
    if not status: return ''
    code = os.waitstatus_to_exitcode(status)
    return f'crash: the process ended with return code {128-code if code < 0 else code}'

def _wait(pid, out, cell_seconds):
    "Until the process ends, or a cell takes too long; why it was ended"
    size,since = -1,time.monotonic()
    while True:
        done,status = os.waitpid(pid, os.WNOHANG)
        if done: return _ended(pid, status)
        time.sleep(.1)
        now = out.stat().st_size if out.exists() else 0
        if now != size: size,since = now,time.monotonic()
        limit = cell_seconds if size > 0 else start_seconds
        if time.monotonic()-since > limit:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f'timeout: {limit} s'

def _read(out):
    lines = [json.loads(l) for l in out.read_text().splitlines() if l.endswith('}')] if out.exists() else []
    started = [l['start'] for l in lines if 'start' in l]
    done = {l['cell']: l for l in lines if 'cell' in l}
    open_cell = next((c for c in reversed(started) if c not in done), None)
    return done,open_cell,any('ready' in l for l in lines)

def _once(job, notebook):
    with tempfile.TemporaryDirectory(prefix='foreign') as folder:
        folder = Path(folder)
        job |= dict(out=str(folder/'out.jsonl'), data=str(folder/'data'))
        ended = _wait(_forked(job, folder, notebook.parent), folder/'out.jsonl', job['cell_seconds'])
        done,open_cell,ready = _read(folder/'out.jsonl')
        log = (folder/'log.txt').read_text().strip()
    if not ready: raise RuntimeError(f"{notebook.name}, {job['mode']}: no cell was reached. {ended}\n{log[-2000:]}")
    return done,open_cell,ended

def run(notebook, cells, module, recipe, recipes, mode, tries=4):
    "Results of all cells in one mode: 'cpu', 'xla' or 'nudged'; a cell that ends the process is left out of a second one"
    job = dict(mode=mode, module=module, setup=recipe.setup, dropout=recipe.dropout,
               cell_seconds=recipe.cell_seconds, nudge=recipe.nudge, recipes=str(recipes or ''))
    broken = {}
    for _ in range(tries):
        todo = [dict(number=c.number, source=c.source, export=is_export(c)) for c in cells if not c.left_out and c.number not in broken]
        done,open_cell,ended = _once(job | dict(cells=todo), notebook)
        if open_cell is None: break
        broken[open_cell] = dict(ended=ended, learners={})
        print(f'  cell {open_cell} on {mode}: {ended}', flush=True)
    return done | broken
