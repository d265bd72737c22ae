"The runner of foreign notebooks sees what differs on XLA. One run of small notebooks, each with faults that were planted here"
import csv, json, os
from pathlib import Path
import own_process, pytest

from foreign.compare import judge
from foreign.observe import numbers_and_words

root = Path(__file__).resolve().parent.parent

imports = """from fastai.test_utils import *
from fastai.basics import *
on_xla = lambda learn: next(learn.model.parameters()).device.type == 'xla'"""
learner = "learn = synth_learner(n_trn=3, n_val=1)"

planted = {
    'clean': {
        'imports': imports,
        'learner': learner,
        'fit': "learn.fit(1)\nprint(learn.recorder.values)",
        'fails on both': "assert False, 'planted'",
        'no number': "#| eval: false\n1/0",
        'marked slow': "#|slow\n1/0",
        'old flag': "#cuda\n1/0",
        'by recipe': "raise SystemError('left out')",
        'replaced': "assert 3 == 4",
        'of setup': "assert from_setup == 1",
        'shown': "tensor([1.,2.])"},
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
        'weights': "if on_xla(learn):\n    with torch.no_grad(): learn.model.a += .01",
        'recorder': "if on_xla(learn): learn.recorder.values = [[1.]]",
        'dropout': "print(F.dropout(torch.ones(9, device=learn.model.a.device)).sum())",
        'drawn': "noise = torch.rand(9, device=learn.model.a.device)",
        'of drawn': "print(noise.sum())",
        'not of drawn': "print(1. + on_xla(learn))"},
    'hanging': {
        'hangs': "import sys, time\nif 'fastai_xla' in sys.modules: time.sleep(600)",
        'after': "print(1)"}}
recipes = {'clean': "skip = {'left out': 'planted'}\nreplace = {'3 == 4': '3 == 3'}\nsetup = 'from_setup = 1'",
    'planted': "dropout = False\nknown = {'it goes': 'because'}",
    'hanging': "cell_seconds = 5"}
expected = {
    'clean': {'imports': 'same', 'learner': 'same', 'fit': 'same',
        'fails on both': 'fails on CPU too', 'no number': 'left out', 'marked slow': 'left out',
        'old flag': 'left out', 'by recipe': 'left out', 'replaced': 'same', 'of setup': 'same', 'shown': 'same'},
    'planted': {'imports': 'same', 'learner': 'same', 'number': 'differs',
        'rounding': 'same', 'words': 'differs', 'exception': 'fails only on XLA',
        'warning': 'warns', 'abort': 'crash on XLA', 'after': 'same', 'weights': 'differs', 'recorder': 'differs',
        'dropout': 'same', 'drawn': 'same', 'of drawn': 'random', 'not of drawn': 'differs'},
    'hanging': {'hangs': 'timeout on XLA', 'after': 'same'}}

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
    res = own_process.run(['-m', 'tests.foreign', folder, '--recipes', folder, '--out', out], folder,
                          env=dict(os.environ, PYTHONPATH=str(root)))
    assert out.exists(), res.stdout + res.stderr
    return {(r['notebook'], list(planted[r['notebook']])[int(r['cell'])]): r
            for r in csv.DictReader(out.open())} | {'returncode': res.returncode}

@pytest.mark.parametrize('nb,cell', [(nb, c) for nb,cells in planted.items() for c in cells])
def test_verdict_of_a_planted_cell(rows, nb, cell):
    row = rows[nb, cell]
    assert row['verdict'] == expected[nb][cell], row

def result(number, error=None): return dict(text=f'loss {number}', error=error, warnings=[], learners={}, where=[])

@pytest.mark.parametrize('on_xla,nudged,verdict', [(1.5, 1.5, 'same'), (1.5001, 1.6, 'same'), (1.501, 1.50001, 'differs'),
                                                   (1.501, 1.5001, 'rounding'), (1.6, 1.5001, 'differs')])
def test_differences_as_large_as_rounding_makes_on_the_cpu_are_told_apart(on_xla, nudged, verdict):
    assert judge(result(1.5), result(on_xla), result(nudged), False)[0] == verdict

def test_progress_bars_times_and_devices_are_not_compared():
    bars = '\rEpoch 1/2 : |████----| 50.00% [1/2 00:00<00:01 0.91]\r0         0.5000  00:07'
    assert numbers_and_words(bars) == numbers_and_words('0    0.5  01:09')
    assert numbers_and_words("tensor([1.5], device='xla:0')") == numbers_and_words('tensor([1.5])')

def test_a_known_difference_is_told_with_its_reason(rows):
    assert rows['planted', 'words']['why'] == 'because'
    assert 'well' in rows['planted', 'words']['detail'] and 'wrong' in rows['planted', 'words']['detail']

def test_the_runner_fails_when_cells_differ(rows): assert rows['returncode'] == 1
