"""What a type checker says of the public names, with `make types`; nothing here is run

A line that ends in `type: ignore` has to be wrong: the checker complains where it is not."""
from typing_extensions import assert_type
import torch
from torch import nn
from fastai.learner import Learner
from fastai_xla.all import (RunningBatchNorm, RunningBatchNorm2d, SAM, XLAOptCallback, XLAReport, convert_norm, count_xla,
                            device, freeze_bn, is_xla, langevin_sample, manual_seed, sync)
from fastai_xla.doctor import Diagnosis, doctor, report_form

def uses(model: nn.Module, x: torch.Tensor, report: XLAReport) -> None:
    assert_type(device(), torch.device)
    assert_type(is_xla(x), bool)
    assert_type(RunningBatchNorm2d(8, mom=.1), RunningBatchNorm2d)
    assert_type(convert_norm(model, 'running'), nn.Module)
    assert_type(SAM(rho=.05), SAM)
    assert_type(doctor(train=False), Diagnosis)
    assert_type(report_form(doctor()), str)
    assert_type(report.clean, bool)
    assert_type(report.empty, bool)
    sync(wait=True)
    manual_seed(42)
    with count_xla() as c: langevin_sample(model, x, n_steps=10, step_size=.1)
    XLAOptCallback(device(0))

def wrong(model: nn.Module) -> None:
    device('xla')  # type: ignore
    RunningBatchNorm('8')  # type: ignore
    convert_norm(model, 3)  # type: ignore
    doctor(trains=True)  # type: ignore
    report_form(3)  # type: ignore
