"""What users write in callbacks, losses, models and data, replayed: the numbers of retraced steps, and of fastai on the CPU

Steps that cannot be replayed are retraced, and the report says why."""
import re
from pathlib import Path
import own_process, pytest
from fastcore.all import groupby
from scenarios import callbacks, data, kept, losses, models, optimizers, settings, state
from scenarios.base import differences, play, scenarios, unexplained

# Of these no step is replayed; the reason says so
refused = {'average_of_the_loss_by_hand': 'reads a value within the step', 'checkpointed': 'code of the user runs in the backward pass',
           'own_autograd_function': 'reads Scaled of an enclosing function'}

# Of these no step is recorded, where the log is not at work
_not_recorded = [
    ('calls', 'a_context_variable time_of_day saves_within_the_step pickles_within_the_step'),
    ('may draw from', 'a_generator_of_weights draws_of_a_generator_of_torch hidden_state_on_a_generator'),
    ('has another value time and again', 'a_deque_of_losses draws_a_host_tensor_before_the_batch'),
    ('is no attribute of the model', 'teacher_in_a_list'),
    ('changes within the step', 'batch_transform_that_counts'),
    ('the value of a tensor is read', 'average_of_the_loss_by_hand'),
    (r'Keeps.after_loss at .*, line \d+, changes a list', 'list_of_losses_within_the_step'),
    ('changes a list', 'auxiliary_losses_in_a_list list_made_before_the_batch'),
    ('draws random numbers on the host', 'draws_of_random coin_of_stochastic_depth batch_transform_draws_on_the_host'),
    ('a graph of its own', 'gradient_penalty'),
    ('an object with tensors', 'returns_an_object_read_after_the_batch returns_an_object_with_slots_read_after_the_batch'),
    ('changes a dict', 'features_by_a_hook_into_a_dict'),
    ('changes a deque', 'hidden_state_in_a_deque'),
    ('sets an attribute', 'hidden_state_of_a_class'),
    ('sets hidden', 'hidden_state_in_a_module_global'),
    ('may store into a container', 'hidden_state_in_a_weak_dict'),
    ('a tensor on the CPU', 'lr_as_a_0_dim_tensor torch_lr_as_a_0_dim_tensor')]
not_recorded = {n: why for why,names in _not_recorded for n in names.split()}

# A log serves such code but with `steps_per_execution`: of scenarios whose names begin alike, two are recorded by guards alone as well
_alike = groupby(scenarios, lambda name: name.split('_')[0])
by_guards = {*not_recorded, *(n for names in _alike.values() for n in names[:2])}

# Of these each step is replayed once it is known
nothing_retraced = set('''accumulates_from_zeros accumulates_from_the_like_of_a_loss numbers_made_in_the_step_and_kept
    membranes_of_the_shape_of_the_last_step auxiliary_losses_in_a_list coin_of_stochastic_depth features_by_a_hook_into_a_dict
    gradient_penalty returns_a_dataclass_read_after_the_batch'''.split())

def told(learn):
    report = learn.xla_report()
    return [*report.plain, *report.beside]

def is_told(why, learn): return any(re.search(why, o) for o in told(learn))

def same(name, refused, retraced):
    "What the replayed scenario leaves is what the retraced one does; the learner, counts, and what has been left"
    s = scenarios[name]
    learn,counts,replayed = play(s)
    diff = differences(retraced, replayed, s.tol)
    assert not diff, f'{len(diff)} differ from retraced steps: {diff[:3]}'
    assert not unexplained(learn, counts)
    if name in refused: assert is_told(refused[name], learn), told(learn)
    return learn,counts,replayed

def retraced(name): return play(scenarios[name], replay=False)[2]

@pytest.mark.parametrize('name', scenarios)
def test_replayed_is_retraced_is_the_cpu(name, request):
    plain = retraced(name)
    learn,counts,replayed = same(name, refused, plain)
    if scenarios[name].cpu:
        diff = differences(play(scenarios[name], on_xla=False)[2], replayed, 1e-4)
        assert not diff, f'{len(diff)} differ from the CPU: {diff[:3]}'
    if name not in refused: assert counts['replayed'] + counts['logged'] > counts['batches']/2, (counts, told(learn))
    if name in nothing_retraced: assert told(learn) == ['what Reads computes around the step']*name.endswith('read_after_the_batch')
    if name == 'accumulates_from_zeros':   # a gradient that comes
        again = learn.xla_report().again
        assert any('`.grad` of a Parameter of shape' in why and 'None -> a tensor' in why for why in again), again
    if name not in by_guards: return
    for fixture in ('recorded', 'without_audits'): request.getfixturevalue(fixture)
    same(name, not_recorded, plain)

def test_what_a_step_makes_is_told_by_the_collector_itself(tmp_path):
    "Lists of its own, and those of others. In the tests' own process, `conftest.py` tells them another way"
    names = [n for n,why in not_recorded.items() if 'changes a ' in why or why.startswith('stores')]
    code = f"""
from test_scenarios import *
from fastai_xla.capture import effects
from fastai_xla.replay import Replay
assert effects.gc.__name__ == 'gc'
Replay.log_of = lambda self: None
for name in {names[1:]}: assert is_told(not_recorded[name], play(scenarios[name])[0]), name
same('{names[0]}', not_recorded, retraced('{names[0]}'))
assert not told(same('list_made_within_the_step', {{}}, retraced('list_made_within_the_step'))[0])"""
    res = own_process.run(['-c', code], tmp_path, Path(__file__).parent)
    assert not res.returncode, res.stderr

def test_there_are_enough(): assert len(scenarios) >= 120
