"The runner of foreign notebooks sees what differs on XLA. One run of small notebooks, each with faults that were planted here"
import csv, json, os, subprocess, sys
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent

imports = """from fastai.test_utils import *
from fastai.basics import *
on_xla = lambda learn: next(learn.model.parameters()).device.type == 'xla'"""
learner = "learn = synth_learner(n_trn=3, n_val=1)"

planted = {
    'clean': {
        'imports': imports,
        'learner': learner,
        'fit': "learn.fit(1)\nprint(on_xla(learn), 'done') if False else print(learn.recorder.values)",
        'fails on both': "assert False, 'planted'",
        'no number': "#| eval: false\n1/0",
        'marked slow': "#|slow\n1/0",
        'old flag': "#cuda\n1/0",
        'by recipe': "raise SystemError('left out')",
        'replaced': "assert 3 == 4",
        'of setup': "assert from_setup == 1",
        'shown': "learn.summary() if False else tensor([1.,2.])"},
    'planted': {
        'imports': imports,
        'learner': learner,
        'number': "print(f'loss {1.5 + .01*on_xla(learn)}')",
        'rounding': "print(f'loss {1.5 + .00001*on_xla(learn)}')",
        'words': "print('it goes ' + ('wrong' if on_xla(learn) else 'well'))",
        'exception': "assert not on_xla(learn), 'only there'",
        'warning': "if on_xla(learn): warnings.warn('only there')",
        'abort': "if on_xla(learn): os.abort()",
        'after': "assert on_xla(learn) or True",
        'hangs': "import time\nif on_xla(learn): time.sleep(600)",
        'weights': "if on_xla(learn):\n    with torch.no_grad(): learn.model.a += .01",
        'recorder': "if on_xla(learn): learn.recorder.values = [[1.]]",
        'dropout': "print(F.dropout(torch.ones(9, device=learn.model.a.device)).sum())",
        'drawn': "noise = torch.rand(9, device=learn.model.a.device)",
        'of drawn': "print(noise.sum())",
        'not of drawn': "print(1. + on_xla(learn))"}}
recipes = {'clean': "skip = {'left out': 'planted'}\nreplace = {'3 == 4': '3 == 3'}\nsetup = 'from_setup = 1'",
    'planted': "dropout = False\ncell_seconds = 15"}
expected = {
    'clean': {'imports': 'same', 'learner': 'same', 'fit': 'same', 'fails on both': 'fails on CPU too', 'no number': 'left out', 'marked slow': 'left out',
        'old flag': 'left out', 'by recipe': 'left out', 'replaced': 'same', 'of setup': 'same', 'shown': 'same'},
    'planted': {'imports': 'same', 'learner': 'same', 'number': 'differs', 'rounding': 'same', 'words': 'differs', 'exception': 'fails only on XLA',
        'warning': 'warns', 'abort': 'crash on XLA', 'after': 'same', 'hangs': 'timeout on XLA', 'weights': 'differs', 'recorder': 'differs',
        'dropout': 'same', 'drawn': 'same', 'of drawn': 'random', 'not of drawn': 'differs'}}

def notebook(path, cells):
    code = [dict(cell_type='code', metadata={}, outputs=[], execution_count=None, source=s.splitlines(True)) for s in cells]
    path.write_text(json.dumps(dict(cells=code, metadata={}, nbformat=4, nbformat_minor=5)))

@pytest.fixture(scope='module')
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp('foreign')
    for name,cells in planted.items():
        notebook(folder/f'{name}.ipynb', cells.values())
        (folder/f'{name}.py').write_text(recipes[name])
    out = folder/'results.csv'
    res = subprocess.run([sys.executable, '-m', 'tests.foreign', folder, '--recipes', folder, '--out', out], cwd=root, capture_output=True, text=True,
        env=dict(os.environ, PYTHONPATH=str(root)))
    assert out.exists(), res.stdout + res.stderr
    return {(r['notebook'], list(planted[r['notebook']])[int(r['cell'])]): r for r in csv.DictReader(out.open())} | {'returncode': res.returncode}

@pytest.mark.parametrize('nb,cell', [(nb, c) for nb,cells in planted.items() for c in cells])
def test_verdict_of_a_planted_cell(rows, nb, cell):
    row = rows[nb, cell]
    assert row['verdict'] == expected[nb][cell], row

def test_the_runner_fails_when_cells_differ(rows): assert rows['returncode'] == 1
