"""What the loops of recurrent layers cost on a TPU, told by its compiler

    make test ARGS='tests/test_aot_costs_text.py'"""
import re
import pytest, torch
from fastai.vision.all import *
import fastai_xla.aot.report, fastai_xla.lowerings.rnn
from fastai_xla.all import *
from fastai_xla.aot.compile import cannot_compile
from fastai_xla.aot.take import take_programs
from aot_learners import shared_cache

pytestmark = pytest.mark.skipif(bool(cannot_compile()), reason=f'no compiler for TPUs: {cannot_compile()}')
steps,bs,n_hid = 24,16,128

class Net(Module):
    def __init__(self): self.rnn,self.lin = nn.LSTM(32, n_hid, batch_first=True),nn.Linear(n_hid, 1)
    def forward(self, x): return self.lin(self.rnn(x)[0])

def learner():
    set_seed(0)
    x,y = torch.randn(2*bs, steps, 32),torch.randn(2*bs, steps, 1)
    dsets = Datasets(L(range(2*bs)), [[x.__getitem__], [y.__getitem__]], splits=[list(range(bs)), list(range(bs, 2*bs))])
    learn = Learner(dsets.dataloaders(bs=bs, num_workers=0), Net(), loss_func=MSELossFlat(), opt_func=SGD)
    learn.remove_cb(ProgressCallback)
    return learn.to_xla()

def report(topology='v5e'):
    r = learner().tpu_report(topology, valid=False, verbose=False)
    assert r, r.error
    return r

def carried(r):
    "Buffers that the loops forward and backward carry, with their layouts"
    loops = [l.split(' while(')[0] for l in r.text.splitlines() if ' while(' in l]
    return [re.findall(r'\w+\[[\d,]*\]\{[\d,]*', l) for l in loops]

def of_rows(r, forms): return [o for loop in carried(r) for o in loop if re.match(r'f32\[(%s),' % '|'.join(map(str, forms)), o)]

def test_each_turn_reads_rows_that_lie_together(monkeypatch):
    "No loop carries a buffer in which the steps of a row lie side by side: a slice of one step would be spread over all of its tiles"
    r = report()
    flat = of_rows(r, [steps*bs])
    assert len(carried(r)) == 2 and len(flat) == 7+8 and all(o.endswith('{1,0') for o in flat), flat   # both ways, inputs and outputs
    for m in (fastai_xla.lowerings.loop, fastai_xla.lowerings.rnn): monkeypatch.setattr(m, 'steps_first', lambda: False)
    r = report()
    assert not of_rows(r, [steps*bs]) and any(o.endswith('{2,0,1') for o in of_rows(r, [f'{steps},{bs}'])), carried(r)

def test_weights_are_cast_before_the_loop():
    "The compiler itself casts what is multiplied at every turn, once, and the loop reads bfloat16"
    for loop,shape in zip(carried(report()), [f'[{n_hid},{4*n_hid}]', f'[{4*n_hid},{n_hid}]'], strict=True):
        assert any(o.startswith('bf16'+shape) for o in loop) and not any(o.startswith('f32'+shape) for o in loop), loop

def test_batch_that_is_split_stays_split(monkeypatch):
    "Steps first are for one TPU; on several, all that is sent is the gradients' sum"
    def sent(): return set(report('v5e-8').collectives.index)
    assert sent() == {'all-reduce'}
    monkeypatch.setattr(fastai_xla.aot.report, 'take_programs', lambda learn, size, valid, devices: take_programs(learn, size, valid))
    assert sent() > {'all-reduce'}

def test_turns_of_a_loop_are_counted():
    "Cycles are those of all steps; bytes are not, as a turn writes a slice of what the loop carries"
    p = report().step.program
    assert {n for _,n in p.run} == {1, steps} and p.cycles > sum(i.cycles for i,_ in p.run)
    assert p.bytes < 2*sum(b.padded for i,_ in p.run for b in i.outs if i.opcode not in ('tuple', 'get-tuple-element'))
