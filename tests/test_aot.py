"""A learner's programs, traced without being run, and compiled for a TPU on a machine without one

    make test ARGS='tests/test_aot.py'

What needs the compiler is skipped where it is not installed (`pip install 'fastai_xla[aot]'`)."""
import subprocess, sys
import numpy as np, pytest, torch, torch_xla
import torch.nn.functional as F
import fastai_xla.aot.compile as compiling
import fastai_xla.capture.recording
from fastai.vision.all import *
from fastai.text.all import AWD_LSTM, awd_lstm_lm_config, language_model_learner
from fastai_xla.all import *
from fastai_xla.aot.compile import cannot_compile
from fastai_xla.aot.chips import target
from fastai_xla.aot.program import Program
from fastai_xla.aot.take import take_programs
import fastai_xla.cases as cases
from fastai_xla.cases import gan
from fastai_xla.runtime import programs_to
from fastai_xla.graphs import rng_state, stablehlo, stablehlo_text
from fastai_xla.transfer import fetch
from common import *

needs_compiler = pytest.mark.skipif(bool(cannot_compile()), reason=f'no compiler for TPUs: {cannot_compile()}')

@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch): monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))

def quiet(learn):
    learn.remove_cb(ProgressCallback)
    return learn

def small(**kwargs):
    set_seed(0)
    return quiet(image_learner(**kwargs))

def wide_learner(n=2**20, bs=64):
    "Some 10 million weights, and activations of 4 MB for each item"
    x,y = torch.randn(2*bs, 10),torch.randn(2*bs, 1)
    dsets = Datasets(L(range(2*bs)), [[x.__getitem__], [y.__getitem__]], splits=[list(range(bs)), list(range(bs, 2*bs))])
    dls = dsets.dataloaders(bs=bs, num_workers=0)
    return quiet(Learner(dls, nn.Sequential(nn.Linear(10, n), nn.ReLU(), nn.Linear(n, 1)), loss_func=MSELossFlat(), opt_func=SGD))

def language_model():
    "That of the coverage table, of one layer instead of three"
    config = awd_lstm_lm_config | dict(emb_sz=20, n_hid=30, n_layers=1)
    return language_model_learner(cases.language_model().dls, AWD_LSTM, config=config, pretrained=False, metrics=[accuracy, Perplexity()])

def weights_after(learn, look):
    "Weights after a fit, a look at the programs, and another fit"
    set_seed(1)
    with learn.no_logging():
        learn.fit(1, 1e-2)
        if look: take_programs(learn, size=24)
        learn.fit(1, 1e-2)
    return [t.numpy() for t in fetch(list(learn.model.state_dict().values()))]

def test_learner_is_as_before_after_its_programs_are_taken():
    plain,looked = weights_after(small().to_xla(), False),weights_after(small().to_xla(), True)
    assert all((a == b).all() for a,b in zip(plain, looked, strict=True))

def test_step_that_is_recorded_later_is_the_one_that_is_taken():
    "A language model makes its state in the first step, which is therefore retraced"
    learn = quiet(language_model()).to_xla()
    def state():
        hidden = [h for hs in learn.model[0].hidden for h in hs]
        values = fetch([*learn.model.state_dict().values(), *hidden, *(t for s in learn.opt.state.values() for t in s.values())])
        return [t.tolist() for t in values if isinstance(t, Tensor)],list(learn.dls.train.items.idxs),rng_state(),learn.model[0].bs
    with learn.no_logging(): learn.fit(1)
    was = state()
    programs = take_programs(learn, size=5)
    assert [p.why for p in programs] == ['', ''] and programs[0].donated
    assert state() == was

def test_programs_of_one_learner_after_another():
    "A first step that makes state is run, so that nothing is left pending"
    for f in (small, language_model, gan, partial(small, opt_func=partial(OptimWrapper, opt=torch.optim.NAdam))):
        learn = quiet(f()).to_xla()
        assert len(take_programs(learn)) == 2
        with learn.no_logging(): learn.fit(1)
        assert len(take_programs(learn)) == 2

@pytest.mark.parametrize('event', ['after_backward', 'after_step'])
def test_step_in_pieces_is_refused(event):
    learn = small()
    learn.add_cb(Callback(**{event: lambda self: float(self.learn.loss)}))
    for replay in ('auto', False):
        with pytest.raises(RuntimeError, match='read within it, by a callback or the model'):
            take_programs(learn.to_xla(replay=replay), valid=False)
    learn = small()
    learn.add_cb(Callback(after_batch=lambda self: float(self.learn.loss)))
    assert 'stablehlo.convolution' in take_programs(learn.to_xla(), valid=False)[0].text

def test_gradient_accumulation_is_looked_at_where_it_steps():
    learns = [small(cbs=cbs).to_xla() for cbs in (None, GradientAccumulation(64))]
    plain,summed = (take_programs(learn, valid=False)[0] for learn in learns)
    assert summed.nbytes('optimizer') == plain.nbytes('optimizer') > 0
    n = sum(p.numel() for p in small().model.parameters())*4
    assert summed.nbytes('weights')+summed.nbytes('other') >= plain.nbytes('weights')+n   # and the gradients so far
    assert all(p.grad is None for p in learns[1].model.parameters())

@pytest.mark.parametrize('size', [0, -1, True, '64', 2.])
def test_size_that_is_none(size):
    with pytest.raises(ValueError, match='no number of items in a batch'): take_programs(small().to_xla(), size=size)

def test_nothing_to_train():
    learn = small().to_xla()
    for p in learn.model.parameters(): p.requires_grad_(False)
    with pytest.raises(ValueError, match='unfreeze'): take_programs(learn)

def test_report_of_the_last_fit_stays():
    learn = small().to_xla()
    with learn.no_logging(): learn.fit(1)
    was = repr(learn.xla_report())
    take_programs(learn)
    assert repr(learn.xla_report()) == was and learn.xla_report().log.batches['training'] > 0

def test_no_step_is_run(monkeypatch):
    def fail(*args): raise AssertionError('a step was run')
    monkeypatch.setattr(fastai_xla.capture.recording, 'run_graph', fail)
    learn = small().to_xla()
    state = rng_state()
    train,valid = take_programs(learn)
    assert (train.kind, train.why, valid.kind, valid.why) == ('training step', '', 'validation step', '')
    assert learn.opt is None and rng_state() == state and not learn.xla_opt.replay.kinds.recs

def test_program_is_the_one_that_is_run():
    "Without the locations it is the text of the program that a fit compiles, but for the order of equal things"
    learn,texts = small().to_xla(),[]
    taken = take_programs(learn, valid=False)[0]
    def note(roots, donated):
        if roots: texts.append((stablehlo_text(roots), len(donated)))
    with programs_to(note), learn.no_logging(): learn.fit(1)
    ops = lambda text: Counter(re.findall(r'stablehlo\.\w+', text))
    assert ops(taken.text) == ops(texts[0][0]) and len(taken.donated) == texts[0][1] > 20

def test_inputs_are_told_apart():
    learn = small().to_xla()
    taken = take_programs(learn, valid=False)[0]
    n = sum(p.numel()*p.element_size() for p in learn.model.parameters())
    buffers = sum(b.numel()*b.element_size() for b in learn.model.buffers())
    assert taken.nbytes('optimizer') == 2*n   # Adam's two averages
    assert taken.nbytes('weights') <= n + buffers and taken.nbytes('weights') >= n
    assert taken.nbytes('batch') == 16*(8*8*4 + 8)

def test_several_steps_are_one_program():
    taken = take_programs(small().to_xla(steps_per_execution=2), valid=False)[0]
    assert taken.steps == 2 and sum(o.role == 'batch' for o in taken.inputs) == 4

def test_step_that_is_not_recorded_says_why():
    taken = take_programs(small().to_xla(replay=False), valid=False)[0]
    assert taken.why == 'replay is off' and taken.donated and 'stablehlo.convolution' in taken.text

def test_size_of_batch_is_free():
    sizes = [[o.shape for o in take_programs(small().to_xla(), size=n, valid=False)[0].inputs if o.role == 'batch'] for n in (5, 100)]
    assert sizes == [[(5, 1, 8, 8), (5,)], [(100, 1, 8, 8), (100,)]]

def test_operators_know_module_and_line():
    sites = take_programs(small().to_xla(), valid=False)[0].sites
    assert {'0.0.0', '1.0.0', '1.3'} <= {m for part,m,_ in sites if part == 'forward'} & {m for part,m,_ in sites if part == 'backward'}
    assert any('optimizer.py' in line for part,_,line in sites if part == 'update')

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
    assert learn.tpu_report(size=n, valid=False, verbose=False) and not learn.tpu_report(size=int(1.1*n)+1, valid=False, verbose=False)
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
    r = learn.to_xla().tpu_report(verbose=False)
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
def test_compiler_is_stopped(monkeypatch):
    started = []
    class Started(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
    monkeypatch.setattr(compiling.subprocess, 'Popen', Started)
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
