"CONTRIBUTING.md tells what of fastai is replaced"
import subprocess, sys
from pathlib import Path
import pytest

docs = Path(__file__).parent.parent/'docs'

@pytest.mark.skipif(not docs.exists(), reason="the package's source alone has no docs")
def test_table_is_current():
    res = subprocess.run([sys.executable, '-c', 'import patches; print(patches.table())'], cwd=docs, capture_output=True, text=True)
    assert res.returncode == 0, res.stderr
    assert res.stdout.strip() in (docs.parent/'CONTRIBUTING.md').read_text(), 'python docs/patches.py'
