"Samples of arguments by PyTorch's developers, for each operator: on XLA as on the CPU"
from pathlib import Path
import own_process, pytest
pytest.importorskip('expecttest')   # which `op_db` imports

def result(code, tmp_path):
    res = own_process.run(['-c', f'from torch_samples import *; print({code})'], tmp_path, Path(__file__).parent)
    assert res.returncode == 0, res.stderr[-2000:]
    return res.stdout.splitlines()[-1]

@pytest.mark.parametrize('part', range(2))
def test_as_on_the_cpu(part, tmp_path): assert result(f'wrong({part}, 2)', tmp_path) == '{}'

def test_a_fault_is_found(tmp_path): assert result('planted()', tmp_path) == '(True, None)'
