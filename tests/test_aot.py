"""A learner's programs, compiled for a TPU on a machine without one

    make test ARGS='tests/test_aot.py'

What needs the compiler is skipped where it is not installed (`pip install 'fastai_xla[aot]'`)."""
import subprocess, sys
import pytest, torch, torch_xla
import torch.nn.functional as F
import fastai_xla.aot.compile as compiling
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.aot.compile import cannot_compile
from fastai_xla.aot.chips import target
from fastai_xla.aot.program import Program
from fastai_xla.graphs import stablehlo, stablehlo_text
from common import *
from aot_learners import *

needs_compiler = pytest.mark.skipif(bool(cannot_compile()), reason=f'no compiler for TPUs: {cannot_compile()}')

def wide_learner(n=2**20, bs=64):
    "Some 10 million weights, and activations of 4 MB for each item"
    x,y = torch.randn(2*bs, 10),torch.randn(2*bs, 1)
    dsets = Datasets(L(range(2*bs)), [[x.__getitem__], [y.__getitem__]], splits=[list(range(bs)), list(range(bs, 2*bs))])
    dls = dsets.dataloaders(bs=bs, num_workers=0)
    return quiet(Learner(dls, nn.Sequential(nn.Linear(10, n), nn.ReLU(), nn.Linear(n, 1)), loss_func=MSELossFlat(), opt_func=SGD))

def test_machine_with_a_tpu_is_asked_about_its_own(monkeypatch):
    monkeypatch.setattr(torch_xla.runtime, 'device_type', lambda: 'TPU')
    for kind,name in (('v5litepod', 'v5e'), ('v6e', 'v6e'), ('v4', 'v4')):
        monkeypatch.setattr(torch_xla._internal.tpu, 'get_tpu_type', lambda kind=kind: kind)
        assert target().name == name and target('v5p').name == 'v5p'

def test_without_the_compiler_there_is_one_message(monkeypatch):
    monkeypatch.setattr(compiling, '_version', lambda n: None)
    for f in (small().to_xla().tpu_report, lambda: largest_batch(small().to_xla())):
        with pytest.raises(ImportError, match=r"jax and libtpu are not installed:\n    pip install 'fastai_xla\[aot\]'"): f()

# With the compiler

@needs_compiler
def test_report_of_a_convnet():
    r = small(dls=image_dls(size=32, bs=64)).to_xla().tpu_report(verbose=False)
    assert r and not r.error and r.bound_by in ('operations', 'memory') and r.bound_ms > 0
    assert str(r).startswith('On a v5e this runs at batch 64')
    forward = 2*64*(16*16*8*9*1 + 8*8*8*9*8 + 8*4)   # twice the multiply-adds of two convolutions and a linear layer
    backward = 2*forward - 2*64*16*16*8*9*1           # for weights and inputs, but not for the images
    assert .9 < r.flops/(forward+backward) < 1.3, r.flops   # the rest is pointwise: a tenth in so small a net
    stats = r.step.stats
    assert r.memory >= r.step.memory == stats['inputs'] + stats['outputs'] - stats['donated'] + stats['temporaries'] + stats['code']
    assert stats['donated'] > 0 and sum(r.step.parts.values()) == r.step.memory
    assert {'0.0.0', '1.0.0'} <= set(r.step.program.by('module').index) and r.step.program.cycles > 1000
    assert '<table' in r._repr_html_()

@needs_compiler
def test_host_time_stands_beside_the_bound():
    learn = small().to_xla()
    r = learn.tpu_report(valid=False, verbose=False)
    assert r.host_ms is None and r.host_bound is None and 'was not measured' in r.host_text
    with learn.no_logging(): learn.fit(2)
    r = learn.tpu_report(valid=False, verbose=False)
    assert r.host_ms == learn.xla_opt.log.host_ms() > r.bound_ms   # of so small a net
    assert r.host_bound == int(16*r.host_ms/r.bound_ms) and f'below a batch of {r.host_bound:,}' in str(r)
    r.host_ms = r.bound_ms/2
    assert 'less than the device needs' in r.host_text

@needs_compiler
def test_bound_is_that_of_a_step():
    r = small().to_xla(steps_per_execution=2).tpu_report(valid=False, verbose=False)
    assert r.step.traced.steps == 2 and r.bound_ms == max(r.step.bounds.values())/2 and f'{r.bound_ms:.3g} ms at best' in r.verdict

@needs_compiler
def test_no_batch_to_try():
    with pytest.raises(ValueError, match='leaves no batch to try'): largest_batch(small().to_xla(), most=0)

@needs_compiler
def test_script_whose_function_gives_no_learner(tmp_path):
    "Up to there nothing has imported jax, the compiler's process alone does"
    imports = "import sys, fastai_xla.all, fastai_xla.aot.worker\nassert 'jax' not in sys.modules"
    (tmp_path/'script.py').write_text(f'{imports}\ndef make_learner(): return 3')
    run = subprocess.run([Path(sys.executable).with_name('fastai_xla_tpu'), tmp_path/'script.py'], capture_output=True, text=True)
    assert run.returncode == 1 and 'has returned int, and is to return a `Learner`' in run.stderr and not run.stdout

@needs_compiler
def test_types_of_the_bytes_moved():
    float32,bfloat16 = (learn.to_xla().tpu_report(valid=False, verbose=False) for learn in (wide_learner(), wide_learner().to_bf16()))
    assert float32.step.program.types['bf16'] == 0 < bfloat16.step.program.types['bf16']
    assert sum(float32.step.program.types.values()) == float32.step.program.bytes and 'of the bytes moved are float32' in str(float32)

@needs_compiler
def test_same_program_is_not_compiled_again(monkeypatch):
    learn = small().to_xla()
    a = learn.tpu_report(valid=False, verbose=False)
    monkeypatch.setattr(compiling, '_run', lambda *args: pytest.fail('compiled again'))
    b = small().to_xla().tpu_report(valid=False, verbose=False)
    assert a.text == b.text and a.memory == b.memory

@needs_compiler
def test_batch_that_does_not_fit_is_told_so():
    r = wide_learner().to_xla().tpu_report(size=8192, valid=False, verbose=False)
    assert not r and r.memory > r.hbm > 15e9 and 'does not fit: it needs at least 32.00 GiB of 16.00 GiB' in str(r).splitlines()[0]

@needs_compiler
def test_largest_batch():
    learn = wide_learner().to_xla()
    n = largest_batch(learn, verbose=False)
    assert learn.tpu_report(size=n, valid=False, verbose=False) and any(m <= 1.1*n+1 and not ok for m,(ok,_) in n.tried.items())
    assert 1000 < n < 8192 and len(n.tried) <= 7

class Complex(Module):
    "A product of complex numbers in double precision, which no TPU has"
    def __init__(self): self.scale = nn.Parameter(torch.ones(1))
    def forward(self, x):
        z = x.flatten(1).to(torch.complex128)
        return x * (z@z.T).real.mean().float() * self.scale

@needs_compiler
def test_operator_that_is_refused_is_told_with_module_and_line():
    learn = small()
    learn.model[0].add_module('planted', Complex())
    r = learn.to_xla().tpu_report(valid=False, verbose=False)
    assert not r and r.memory is None
    assert all(s in r.error for s in ('C128', 'module 0.planted', 'test_aot.py', 'to(torch.complex128)')), r.error

class Spectrum(Module):
    "The same in batches: here the compiler would end its process"
    def forward(self, x):
        z = x.detach().to(torch.complex128)
        return (z @ z.mT).abs().float()

@needs_compiler
def test_operator_that_ends_the_compiler_is_told_with_module_and_line():
    learn = small()
    learn.model[0].add_module('planted', Spectrum())
    r = learn.to_xla().tpu_report(valid=False, verbose=False)
    assert not r and all(s in r.error for s in ('C128', 'module 0.planted', 'to(torch.complex128)')), r.error

@needs_compiler
def test_batch_split_over_devices():
    learn = small().to_xla()
    r = learn.tpu_report('v5e-8', valid=False, verbose=False)
    n = sum(p.numel() for p in learn.model.parameters())*4
    assert r and 'all-reduce' in r.collectives.index and n <= r.collectives.loc['all-reduce', 'bytes'] <= 2*n
    with pytest.raises(ValueError, match='cannot be split over 8 devices'): learn.tpu_report('v5e-8', size=12, verbose=False)

@needs_compiler
def test_compiler_is_stopped(monkeypatch, tmp_path):
    started = []
    class Started(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
    monkeypatch.setattr(compiling.subprocess, 'Popen', Started)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))   # where the program is not kept already
    r = small().to_xla().tpu_report(limit=.1, valid=False, verbose=False)
    assert not r and 'stopped after' in r.error and 'limit=' in r.error and 'is not known' in r.verdict and 'will not' not in r.verdict
    def interrupt(*args): raise KeyboardInterrupt
    monkeypatch.setattr(compiling, '_wait', interrupt)
    with pytest.raises(KeyboardInterrupt): small().to_xla().tpu_report(valid=False, verbose=False)
    assert len(started) == 2 and all(p.returncode == -9 for p in started)

@needs_compiler
def test_grid_sample_gathers_one_row_per_pixel():
    "A row is 128 lanes wide on a TPU, so that a gather of each of the four taps takes four times as much"
    x,grid = torch.rand(8, 3, 32, 32).to(device()),(torch.rand(8, 32, 32, 2)*2-1).to(device())
    sync()
    roots = [F.grid_sample(x, grid, padding_mode='reflection', align_corners=True)]
    res = compiling.compile_for(stablehlo(roots), stablehlo_text(roots), target('v5e'))
    program = Program(res['text'])
    assert not res['error'] and max(b.padded for bs in program.where.values() for b in bs) <= 8*32*32*128*4
