"""A learner's programs, traced without being run

    make test ARGS='tests/test_aot_programs.py'"""
from functools import lru_cache
import pytest, torch
import fastai_xla.capture.recording
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.aot.take import take_programs
import fastai_xla.cases as cases
from fastai_xla.cases import gan
from fastai_xla.runtime import programs_to
from fastai_xla.graphs import rng_state, stablehlo_text
from fastai_xla.transfer import fetch
from aot_learners import *

language_model = partial(cases.language_model, 10, n_layers=1)   # that of the coverage table has three, and more texts

@lru_cache
def program(): return take_programs(small().to_xla(), valid=False)[0]

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
    learn,plain = small(cbs=GradientAccumulation(64)).to_xla(),program()
    summed = take_programs(learn, valid=False)[0]
    assert summed.nbytes('optimizer') == plain.nbytes('optimizer') > 0
    n = sum(p.numel() for p in small().model.parameters())*4
    assert summed.nbytes('weights')+summed.nbytes('other') >= plain.nbytes('weights')+n   # and the gradients so far
    assert all(p.grad is None for p in learn.model.parameters())

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
    taken,model = program(),small().model
    n = sum(p.numel()*p.element_size() for p in model.parameters())
    buffers = sum(b.numel()*b.element_size() for b in model.buffers())
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
    sites = program().sites
    assert {'0.0.0', '1.0.0', '1.3'} <= {m for part,m,_ in sites if part == 'forward'} & {m for part,m,_ in sites if part == 'backward'}
    assert any('optimizer.py' in line for part,_,line in sites if part == 'update')
