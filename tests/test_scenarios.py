"""What users write in callbacks, losses, models and data, replayed: the numbers of retraced steps, and of fastai on the CPU

Steps that cannot be replayed are retraced, and the report says why."""
from pathlib import Path
import own_process, pytest
from scenarios import callbacks, data, kept as _, losses, models, optimizers, settings, state
from scenarios.base import differences, play, scenarios, unexplained

# Of these no step is replayed; the reason says so
refused = {'average_of_the_loss_by_hand': 'the value of a tensor is read'}

@pytest.mark.parametrize('name', scenarios)
def test_replayed_is_retraced_is_the_cpu(name):
    s = scenarios[name]
    learn,counts,replayed = play(s)
    diff = differences(play(s, replay=False)[2], replayed, s.tol)
    assert not diff, f'{len(diff)} differ from retraced steps: {diff[:3]}'
    if s.cpu:
        diff = differences(play(s, on_xla=False)[2], replayed, 1e-4)
        assert not diff, f'{len(diff)} differ from the CPU: {diff[:3]}'
    assert not unexplained(learn, counts)
    report = learn.xla_report()
    told = [*report.plain, *report.beside]
    if name in refused: assert any(refused[name] in why for why in told), told
    else: assert counts['replayed'] + counts['logged'] > counts['batches']/2, (counts, told)

# What recordings see of lists and dicts: those that a step makes are its own, and a change of others is refused

made = ['list_made_within_the_step']
kept = ('list_made_before_the_batch list_of_losses_within_the_step auxiliary_losses_in_a_list '
        'features_by_a_hook_into_a_dict hidden_state_in_a_deque hidden_state_in_a_weak_dict').split()

def lists_are_told():
    for name in made + kept:
        learn,_,replayed = play(scenarios[name])
        assert not differences(play(scenarios[name], replay=False)[2], replayed, 0)
        assert bool(learn.xla_report().plain) == (name in kept), name

def test_lists_are_told(recorded): lists_are_told()

def test_lists_are_told_by_the_collector_itself(tmp_path):
    "In the tests' own process, `conftest.py` tells what a step has made another way"
    code = """
import test_scenarios
from fastai_xla.capture import effects
from fastai_xla.replay import Replay
assert effects.gc.__name__ == 'gc'
Replay.log_of = lambda self: None
test_scenarios.lists_are_told()"""
    res = own_process.run(['-c', code], tmp_path, Path(__file__).parent)
    assert not res.returncode, res.stderr

def test_there_are_enough(): assert len(scenarios) >= 120
