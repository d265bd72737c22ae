import argparse, csv, json, os, signal, subprocess, sys, tempfile, time
from collections import Counter
from pathlib import Path
from .compare import compare, verdicts
from .notebooks import Recipe, is_export, read_cells, read_recipe

root = Path(__file__).resolve().parent.parent.parent
fast_compiles = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'
start_seconds = 240   # Until the first cell: imports, the recipe's setup

def _environment(folder, mode):
    env = dict(os.environ, PJRT_DEVICE='CPU', MPLBACKEND='agg', IN_TEST='1', FASTAI_HOME=str(folder/'home'), HF_HUB_OFFLINE='1', PYTHONWARNINGS='default')
    if mode == 'xla': env['XLA_FLAGS'] = fast_compiles
    return env | dict(PYTHONPATH=os.pathsep.join([str(root), env.get('PYTHONPATH', '')]))

def _work_folder(folder, notebooks):
    "Where cells run: an empty folder with links to what lies beside the notebooks"
    work = folder/'work'
    work.mkdir()
    for f in notebooks.iterdir():
        if f.suffix != '.ipynb': (work/f.name).symlink_to(f.resolve())
    return work

def _read(out):
    lines = [json.loads(l) for l in out.read_text().splitlines() if l.endswith('}')] if out.exists() else []
    started = [l['start'] for l in lines if 'start' in l]
    done = {l['cell']: l for l in lines if 'cell' in l}
    open_cell = next((c for c in reversed(started) if c not in done), None)
    return done,open_cell,any('ready' in l for l in lines),any('end' in l for l in lines)

def _wait(process, out, cell_seconds):
    "Until the process ends, or a cell takes too long; why it was ended"
    size,since = -1,time.monotonic()
    while process.poll() is None:
        time.sleep(.2)
        now = out.stat().st_size if out.exists() else 0
        if now != size: size,since = now,time.monotonic()
        limit = cell_seconds if size > 0 else start_seconds
        if time.monotonic()-since > limit:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f'timeout: {limit} s'
    return '' if process.returncode == 0 else f'crash: the process ended with return code {128-process.returncode if process.returncode < 0 else process.returncode}'

def _process(job, folder, mode, notebooks):
    out = Path(job['out'])
    (folder/'job.json').write_text(json.dumps(job))
    with open(folder/'log.txt', 'w') as log:
        process = subprocess.Popen([sys.executable, '-m', 'tests.foreign.child', str(folder/'job.json')], cwd=_work_folder(folder, notebooks), stdout=log,
            stderr=subprocess.STDOUT, env=_environment(folder, mode), start_new_session=True)
        ended = _wait(process, out, job['cell_seconds'])
    last = (folder/'log.txt').read_text().strip().splitlines()[-1:]
    return ended + (f" ({last[0][:200]})" if ended.startswith('crash') and last else '')

def run(notebook, cells, module, recipe, recipes, mode, tries=4):
    "Results of all cells in one mode; a cell that ends the process is left out of a second one"
    todo = [c for c in cells if not c.left_out]
    broken = {}
    for _ in range(tries):
        with tempfile.TemporaryDirectory(prefix='foreign') as folder:
            folder = Path(folder)
            run_now = [dict(number=c.number, source=c.source, export=is_export(c)) for c in todo if c.number not in broken]
            job = dict(mode=mode, out=str(folder/'out.jsonl'), data=str(folder/'data'), cells=run_now, module=module, setup=recipe.setup, dropout=recipe.dropout,
                cell_seconds=recipe.cell_seconds, recipes=str(recipes or ''))
            ended = _process(job, folder, mode, notebook.parent)
            done,open_cell,ready,complete = _read(folder/'out.jsonl')
            if not ready: raise RuntimeError(f"{notebook.name} on {mode}: no cell was reached: {ended}\n{(folder/'log.txt').read_text()[-2000:]}")
        if complete or open_cell is None: break
        broken[open_cell] = dict(ended=ended, learners={})
        print(f'  cell {open_cell}: {ended}', flush=True)
    return done | broken

def run_notebook(path, recipes):
    recipe = read_recipe(recipes and recipes/f'{path.stem}.py') or Recipe()
    cells,module = read_cells(path, recipe)
    results = [run(path, cells, module, recipe, recipes, mode) for mode in ('cpu', 'xla')]
    return [dict(notebook=path.stem, **row) for row in compare(cells, module, *results)]

def chosen(folder, recipes, only):
    "With a folder of recipes those that have one, or those that `only` names"
    found = [p for p in sorted(folder.glob('*.ipynb')) if p.stat().st_size]
    if only: return [p for p in found if any(o in p.stem for o in only)]
    return [p for p in found if not recipes or (recipes/f'{p.stem}.py').exists()]

def summary(rows):
    counts = Counter(r['verdict'] for r in rows)
    return ', '.join(f'{counts[v]} {v}' for v in verdicts if counts[v])

def _write(out, rows):
    with open(out, 'w', newline='') as f:
        w = csv.DictWriter(f, list(rows[0]), lineterminator='\n')
        w.writeheader()
        w.writerows(rows)

def main():
    parser = argparse.ArgumentParser('python -m tests.foreign', description='Run notebooks on the CPU and on XLA, and compare them cell by cell')
    parser.add_argument('folder', type=Path, help='folder of notebooks')
    parser.add_argument('--only', nargs='+', help='parts of the names of the notebooks to run')
    parser.add_argument('--recipes', type=Path, help='folder of recipes: notebook.py for notebook.ipynb')
    parser.add_argument('--out', type=Path, help='CSV file for the results')
    args = parser.parse_args()
    rows = []
    for path in chosen(args.folder.resolve(), args.recipes and args.recipes.resolve(), args.only):
        print(path.stem, flush=True)
        try: new = run_notebook(path, args.recipes and args.recipes.resolve())
        except (RuntimeError, ValueError) as e: new = [dict(notebook=path.stem, cell=-1, first='', verdict='fails on CPU too', detail=str(e), cpu_s='', xla_s='', executions='', compiles='', to_host='', reasons='')]
        rows += new
        for r in new:
            if r['verdict'] not in ('same', 'library', 'left out'): print(f"  {r['cell']:>3} {r['verdict']}: {r['first'][:60]}\n      {r['detail'][:700]}", flush=True)
        print('  ' + summary(new), flush=True)
        if args.out and rows: _write(args.out, rows)
    print(summary(rows))
    sys.exit(any(r['verdict'] in ('differs', 'fails only on XLA', 'crash on XLA', 'timeout on XLA') for r in rows))

if __name__ == '__main__': main()
