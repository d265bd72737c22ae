"Plain torch code on the XLA device, beside a learner or without one"
import os, subprocess, sys

env = os.environ | dict(PJRT_DEVICE='CPU', XLA_FLAGS='--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true')

def run(code):
    "`code` in a process of its own"
    res = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=os.path.dirname(__file__), env=env)
    assert res.returncode == 0, res.stdout+res.stderr
    return res.stdout

imported = '''
import fastai_xla.all
from fastai_xla.runtime import xla_counts, XLACounts, count_xla
assert xla_counts() == XLACounts(), xla_counts()
import torch, torch_xla, torch.nn.functional as F
from torch import nn
from torch_xla.debug import metrics
assert not metrics.counter_value('CreateXlaTensor')
dev = torch_xla.device()
'''

def test_lowerings_hold_from_the_import_on():
    "torch_xla's own kernel crashes in the first and falls back to the CPU in the second; nobody has called to_xla"
    run(imported + '''
x,grid = torch.randn(4, 3, 5, 5),torch.rand(4, 6, 6, 2)*2-1
def grads(dev):
    m,a,g = nn.BatchNorm2d(3).eval().to(dev),x.detach().to(dev).requires_grad_(),grid.detach().to(dev).requires_grad_()
    F.grid_sample(m(a), g, align_corners=False).square().sum().backward()
    return [t.cpu() for t in (a.grad, g.grad, m.weight.grad, m.bias.grad)]
expected = grads('cpu')
with count_xla() as c: actual = grads(dev)
assert not c.fallbacks, c
for a,e in zip(actual, expected): torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
''')
