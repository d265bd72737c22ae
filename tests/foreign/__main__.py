import argparse, csv, sys
from collections import Counter
from pathlib import Path
from .processes import environment, run
environment()
from .compare import bad, compare, verdicts
from .notebooks import Recipe, read_cells, read_recipe

def run_notebook(path, recipes):
    "A row for each cell"
    recipe = read_recipe(recipes and recipes/f'{path.stem}.py') or Recipe()
    cells,module = read_cells(path, recipe)
    args = path,cells,module,recipe,recipes
    on_cpu,on_xla = run(*args, 'cpu'),run(*args, 'xla')
    rows = compare(cells, module, on_cpu, on_xla)
    if any(r['verdict'] in ('differs', 'fails only on XLA') for r in rows):
        rows = compare(cells, module, on_cpu, on_xla, run(*args, 'nudged'))
    return [dict(notebook=path.stem, **row) for row in rows]

def chosen(folder, recipes, only):
    "Notebooks that have a recipe, or all if there is no folder of recipes"
    found = [p for p in sorted(folder.glob('*.ipynb')) if p.stat().st_size and (not recipes or (recipes/f'{p.stem}.py').exists())]
    return [p for p in found if not only or any(o in p.stem for o in only)]

def summary(rows):
    counts = Counter(r['verdict'] for r in rows)
    return ', '.join(f'{counts[v]} {v}' for v in verdicts if counts[v])

def _show(rows):
    for r in rows:
        if r['verdict'] not in ('same', 'library', 'left out'):
            print(f"  {r['cell']:>3} {r['verdict']}: {r['first'][:60]}\n      {r['detail'][:700]}")
    print('  ' + summary(rows), flush=True)

def _write(out, rows):
    with open(out, 'w', newline='') as f:
        w = csv.DictWriter(f, list(rows[0]), lineterminator='\n')
        w.writeheader()
        w.writerows(rows)

def main():
    parser = argparse.ArgumentParser('python -m tests.foreign',
                                     description='Run notebooks on the CPU and on XLA, and compare them cell by cell')
    parser.add_argument('folder', type=Path, help='folder of notebooks')
    parser.add_argument('--only', nargs='+', help='parts of the names of the notebooks to run')
    parser.add_argument('--recipes', type=Path, help='folder of recipes: notebook.py for notebook.ipynb')
    parser.add_argument('--out', type=Path, help='CSV file for the results; rows of other notebooks in it stay')
    args = parser.parse_args()
    recipes = args.recipes and args.recipes.resolve()
    old = list(csv.DictReader(args.out.open())) if args.out and args.out.exists() else []
    rows = []
    for path in chosen(args.folder.resolve(), recipes, args.only):
        print(path.stem, flush=True)
        new = run_notebook(path, recipes)
        _show(new)
        rows += new
        fresh = {r['notebook'] for r in rows}
        if args.out: _write(args.out, sorted(rows + [r for r in old if r['notebook'] not in fresh], key=lambda r: r['notebook']))
    print(summary(rows))
    sys.exit(any(r['verdict'] in bad for r in rows))

if __name__ == '__main__': main()
