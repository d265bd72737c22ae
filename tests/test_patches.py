"CONTRIBUTING.md tells what of fastai is replaced"
from pathlib import Path
import own_process, pytest

docs = Path(__file__).parent.parent/'docs'

@pytest.mark.skipif(not docs.exists(), reason="the package's source alone has no docs")
def test_table_is_current(tmp_path):
    res = own_process.run(['-c', 'import patches; print(patches.table())'], tmp_path, docs)
    assert res.returncode == 0, res.stderr
    assert res.stdout.strip() in (docs.parent/'CONTRIBUTING.md').read_text(), 'python docs/patches.py'
