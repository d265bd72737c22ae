"""Each notebook is a test, in a process of its own: what one patches or compiles does not reach the next

A cell may take as long as it takes.

    make test ARGS='-k runtime'                # some of them
    NB_FLAGS='tpu slow' make test              # with the cells marked `#| tpu` and `#| slow`"""
import os, subprocess, sys
from pathlib import Path
import pytest
from nbdev.config import get_config
from nbdev.doclinks import nbglob

root = Path(__file__).resolve().parent.parent
nbs = get_config(root).nbs_path
run = ("import sys; from nbdev.test import nbdev_test; "
       "nbdev_test.__wrapped__(*sys.argv[1:2], flags=sys.argv[2], n_workers=0, cell_timeout=0)")

@pytest.mark.parametrize('nb', sorted(nbglob(nbs, as_path=True)), ids=lambda o: str(o.relative_to(nbs)))
def test_notebook(nb):
    env = {k: v for k,v in os.environ.items() if k != 'XLA_FLAGS'}   # which other tests set; notebooks run as users run them
    res = subprocess.run([sys.executable, '-c', run, str(nb), os.environ.get('NB_FLAGS', '')],
                         cwd=root, env=env, capture_output=True, text=True)
    assert res.returncode == 0, f'{res.stdout}\n{res.stderr}'
