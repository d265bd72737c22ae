"A torch_xla that is missing or does not fit, a client that does not start, a backward pass before it: said, with the cure"
import os, subprocess, sys
import pytest
from fastai.vision.all import *
from fastai_xla.all import *
import own_process

def run(code, **env):
    res = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=Path(__file__).parent, env=os.environ | env)
    return res.returncode,res.stdout+res.stderr

def forked(code, tmp_path, **env):
    res = own_process.run(['-c', code], tmp_path, Path(__file__).parent, os.environ | env)
    return res.returncode,res.stdout+res.stderr

# a fork for each version, which goes on behind the loop
pretend = '''
import importlib.metadata as metadata, os, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch_xla', '_XLAC'): raise ImportError(f'undefined symbol in {name}')
sys.meta_path.insert(0, Block())
from fastai.vision.all import *
assert len(os.listdir('/proc/self/task')) == 1, 'a fork would lack threads'
os.dup2(1, 2)
for installed in (None, '2.8.0', '2.9.0'):
    print('UNDER', installed, flush=True)
    if not os.fork(): break
    print('ENDS WITH', os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else: sys.exit()
real = metadata.version
def version(name):
    if name != 'torch_xla': return real(name)
    if installed is None: raise metadata.PackageNotFoundError(name)
    return installed
metadata.version = version
from fastai_xla.all import *
from common import *
learn = image_learner().remove_cb(ProgressCallback)
with learn.no_logging(): learn.fit(1)
print('TRAINED ON', learn.dls.device)
learn.to_xla()
'''

def test_torch_xla_missing_or_wrong():
    "fastai goes on working; to_xla tells what to install"
    _,out = run(pretend)
    for part,said in zip(out.split('UNDER ')[1:], ('torch_xla is not installed', 'do not match', 'does not load'), strict=True):
        assert 'ENDS WITH 1' in part and 'TRAINED ON cpu' in part and 'ImportError' in part and said in part, part
        assert "pip install 'torch==2.9.*' 'torchvision==0.24.*' 'torch_xla==2.9.*'" in part, part

asked = "from fastai_xla.runtime import *\nfor _ in range(2):\n  try: device()\n  except RuntimeError as e: print('TOLD', e)"
# a libtpu without a TPU would ask the cloud's metadata server for minutes
no_metadata = dict(TPU_SKIP_MDS_QUERY='1')
# torch_xla in this process has told its children where libtpu is
without_libtpu = """
import os, sys
for k in ('TPU_LIBRARY_PATH', 'PTXLA_TPU_LIBRARY_PATH'): os.environ.pop(k, None)
sys.modules['libtpu'] = None
"""

@pytest.mark.parametrize('device,before,said,not_said', [
    ('TPU', '', ['this machine has no TPU', 'a TPU serves one at a time'], ['pip install', 'GPU']),
    ('TPU', without_libtpu, ['libtpu, which is not installed', "pip install 'fastai_xla[tpu]'"], ['this machine has no TPU', 'GPU']),
    ('CUDA', '', ['has no client for CUDA', 'On a GPU fastai trains as it is: leave out `to_xla()`'],
     ['pip install', 'this machine has no TPU'])],
    ids=['no TPU', 'no libtpu', 'CUDA'])
def test_client_does_not_start(device, before, said, not_said, tmp_path):
    "The cure is that of the cause, twice the same, and how to go on without a TPU"
    env = dict(PJRT_DEVICE=device) | no_metadata
    # the server of forks has imported torch_xla, and found libtpu
    rc,out = run(before + asked, **env) if before else forked(asked, tmp_path, **env)
    assert rc == 0 and out.count(f'TOLD The XLA client did not start (PJRT_DEVICE={device})') == 2 and 'PJRT_DEVICE=CPU' in out
    assert all(out.count(o) == 2 for o in said) and not any(o in out for o in not_said), out

trap = '''
import torch, warnings
w = torch.ones(3, requires_grad=True)
(w*2).sum().backward()
from fastai.vision.all import *
from fastai_xla.all import *
import fastai_xla.transfer as transfer
from common import *
if {incurable}: torch.autograd.set_multithreading_enabled = lambda on: None
learn = image_learner().remove_cb(ProgressCallback).to_xla()
before = transfer.fetch(learn.model[0][0][0].weight.clone())
with learn.no_logging(): learn.fit(1, 1e-2)
assert (transfer.fetch(learn.model[0][0][0].weight.detach())-before).abs().max() > 0
print('TRAINED')
'''

def test_trap_is_cured(tmp_path):
    rc,out = forked(trap.format(incurable=False), tmp_path)
    assert (rc == 0 and 'TRAINED' in out and 'ran a .backward() before the XLA device existed' in out
            and 'set_multithreading_enabled(False)' in out)

def test_trap_without_cure(tmp_path):
    rc,out = forked(trap.format(incurable=True), tmp_path)
    assert rc == 1 and 'TRAINED' not in out
    assert ('RuntimeError: This process ran a .backward() before the XLA device existed' in out
            and 'Restart the notebook and put `from fastai_xla.all import *` into its first cell' in out)

def test_cache_probe(tmp_path, tmp_path_factory):
    """Elsewhere than on a CPU, the second process with a folder knows whether programs can be read back

    The compiler for the CPU stands for one that cannot"""
    code = f"""import fastai_xla.graphs as r
r.device()
r.torch_xla.runtime.device_type = lambda: 'TPU'
print('why:', r.use_cache({str(tmp_path)!r}), '|', r.use_cache({str(tmp_path)!r}), '|', r.use_cache('elsewhere'), '.')"""
    (_,first),(_,second) = forked(code, tmp_path_factory.mktemp('out')),forked(code, tmp_path_factory.mktemp('out'))
    assert 'why:  |  | other programs have been compiled' in first and list(tmp_path.iterdir())
    assert 'why: this version of torch_xla cannot read back' in second
