"Training loops written by hand, as the tutorials of torch_xla and Accelerate write them"
import torch, torch_xla, torch_xla.core.xla_model as xm
from torch.utils.data import DataLoader
from .clock import Clock, xla_counts
from .data import make_data
from .models import datasets, loss_of, make_model, make_opt, score

def _torch_xla(cfg, model, dl):
    from torch_xla.distributed.parallel_loader import MpDeviceLoader
    model = model.to(torch_xla.device())
    return model, make_opt(cfg.model, model.parameters()), MpDeviceLoader(dl, torch_xla.device()), lambda loss: loss.backward()

def _accelerate(cfg, model, dl):
    from accelerate import Accelerator
    acc = Accelerator()
    assert acc.device.type == 'xla', acc.device
    return *acc.prepare(model, make_opt(cfg.model, model.parameters()), dl), acc.backward

def run(cfg):
    train,valid = datasets(make_data(cfg.model, cfg.bs, cfg.steps))
    dl = DataLoader(train, cfg.bs, shuffle=cfg.model != 'awd_lstm', drop_last=True)
    torch_xla.device()   # starts the client, which is no part of the first step
    if cfg.peer == 'accelerate': import accelerate
    clock = Clock(cfg, xla_counts, xm.wait_device_ops)
    model,opt,dl,backward = globals()[f'_{cfg.peer}'](cfg, make_model(cfg.model), dl)
    for _ in range(clock.epochs):
        model.train()
        if hasattr(model, 'reset'): model.reset()
        clock.begin()
        for i,(*xb,yb) in enumerate(dl):   # asking for a batch runs the step before it
            if i: clock.step()
            opt.zero_grad()
            backward(loss_of(model(*xb), yb))
            opt.step()
        clock.end(i+1)
    clock.tell(score=score(model, valid, cfg.bs))
