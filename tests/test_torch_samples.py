"Samples of arguments by PyTorch's developers, for each operator: on XLA as on the CPU"
from pathlib import Path
import own_process, pytest
pytest.importorskip('expecttest')   # which `op_db` imports

def result(code, tmp_path):
    res = own_process.run(['-c', f'from torch_samples import *; print({code})'], tmp_path, Path(__file__).parent)
    assert res.returncode == 0, res.stderr[-2000:]
    return res.stdout.splitlines()[-1]

# to import `op_db` takes a while, and is done in two processes, not three
def test_as_on_the_cpu_and_a_fault_is_found(tmp_path): assert result('wrong(0, 2), planted()', tmp_path) == '{} (True, None)'
def test_the_other_half_is_as_on_the_cpu(tmp_path): assert result('wrong(1, 2)', tmp_path) == '{}'
