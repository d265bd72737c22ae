"Programs of the community, in a small form: they learn, on XLA as on the CPU, and what a batch costs is steady or the report says why"
from dataclasses import dataclass
from importlib import import_module

import pytest
from common import *
from fastai_xla.all import *
from fastai_xla.runtime import device

device()   # before any backward pass on the CPU

@dataclass
class Expected:
    "What holds for a program"
    least:float   # Metric that shows it has learned
    apart:float=.02   # How far the metrics of CPU and XLA may be from each other
    exact:bool=True   # No random numbers on the device: the same losses
    executions:int=1   # Per steady training batch: more where a callback or a transform computes beside the step
    reason:str=''   # What the report says of batches that were not replayed

programs = dict(
    arcface=Expected(.85, reason='not the same each time'),
    audio_spectrograms=Expected(.8, .06, exact=False, executions=2),
    bert_classifier=Expected(.7, executions=2, reason='stores into a container'),
    byol=Expected(.6, .12, exact=False, executions=2),
    diffusion=Expected(.5, .12, exact=False, executions=2),
    distillation=Expected(.8, reason='stores into a container'),
    fixmatch=Expected(.75, .08, exact=False),
    gan_by_hand=Expected(.3, .25, exact=False),
    gan_learner=Expected(.6, executions=2),
    gpt_language_model=Expected(.65, reason='changes a dict'),
    kaggle_images=Expected(.4, .15, exact=False),
    medical_segmentation=Expected(.5),
    multi_task=Expected(.8),
    simclr=Expected(.75, .1, exact=False, executions=2, reason='aten::nonzero'),
    tabular_competition=Expected(.85),
    time_series=Expected(.8, executions=2))

def agree(cpu, xla, want):
    "Has it learned on both, equally well, by the same losses?"
    assert cpu['metric'] > want.least and xla['metric'] > want.least, (cpu['metric'], xla['metric'])
    assert abs(cpu['metric']-xla['metric']) <= want.apart, (cpu['metric'], xla['metric'])
    if not want.exact: return   # pseudo-labels, and with them the number of batches, depend on the draws
    assert len(cpu['losses']) == len(xla['losses'])
    assert all(abs(a-b) < 1e-3*max(1, abs(a)) for a,b in zip(cpu['losses'][:8], xla['losses'][:8]))

def explained(report, want):
    "Is the cost of a batch steady, or does the report say why it is not?"
    cost = report.per_batch()
    assert report.log.n_steady('training') > 0 and cost['executions'] <= want.executions, cost
    steady = cost['compiles'] < .05 and cost['to host'] == cost['fallbacks'] == 0   # a small program may come late, once
    assert steady or report.plain, report
    if want.reason: assert any(want.reason in why for why in report.plain), report.plain

@pytest.mark.parametrize('name', programs)
def test_program_learns_on_xla_as_on_the_cpu(name):
    "One test for each, as both halves need both runs"
    run,want = import_module(f'community.{name}').run,programs[name]
    cpu,xla = (run(on_xla, 0, small=True) for on_xla in (False, True))
    agree(cpu, xla, want)
    explained(xla['learn'].xla_report(), want)

def test_step_that_resizes_is_replayed():
    "What a lowering needs beside its inputs is no tensor that somebody may change"
    resize = nn.Upsample(scale_factor=2), nn.Upsample(size=7, mode='bilinear')
    model = nn.Sequential(ConvLayer(1, 8, stride=2), *resize, nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(8, 4))
    learn = Learner(image_dls(), model, loss_func=CrossEntropyLossFlat()).to_xla()
    learn.fit(1)
    assert not learn.xla_report().plain and learn.xla_report().per_batch()['executions'] == 1
