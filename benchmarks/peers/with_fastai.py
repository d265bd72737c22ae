"`learn.fit`, whole: data loading, callbacks, recorder, progress bar. On the CPU, on XLA with the callback of 2020-22, and with fastai_xla"
import inspect
from functools import partial
import torch
from fastai.basics import *
from fastai.callback.all import *
from fastai.callback.rnn import rnn_cbs
from .clock import Clock, Missing, no_counts, xla_counts
from .data import make_data
from .models import datasets, lr_of, make_model, score, uses_sgd

class First(Callback):
    "Before all other callbacks"
    order,run_valid = -1000,False
    def __init__(self, clock): self.clock = clock
    def before_train(self): self.clock.begin()

class Last(First):
    "After all other callbacks"
    order = 2000
    def __init__(self, clock):
        super().__init__(clock)
        self.after_batch = self._step
    def before_train(self): pass
    def _step(self):
        self.clock.step()
        if self.clock.first_s is not None: del self.after_batch   # timed; what a user's callback costs is none of this
    def after_train(self): self.clock.end(self.iter+1)

class XMStep(Callback):
    "The algorithm of fastai_xla_extensions, 2020-22"
    def before_step(self):
        import torch_xla.core.xla_model as xm
        xm.optimizer_step(self.opt, barrier=True)
        raise CancelStepException

def _cpu(learn): pass

def _compile(learn): learn.model = torch.compile(learn.model)

def _xm_step(learn):
    import torch_xla
    learn.model.to(torch_xla.device())
    learn.dls.to(torch_xla.device())
    learn.add_cb(XMStep())

def _to_xla(learn, **kwargs):
    import fastai_xla.all
    known = inspect.signature(learn.to_xla).parameters
    if lacking := [k for k,v in kwargs.items() if v and k not in known]: raise Missing(f"to_xla() has no {', '.join(lacking)}")
    learn.to_xla(**{k: v for k,v in kwargs.items() if k in known})

starts = dict(fastai_cpu=_cpu, fastai_compile=_compile, xm_step=_xm_step, fastai_xla=partial(_to_xla, replay=False),
    fastai_xla_replay=partial(_to_xla, replay=True), fastai_xla_k8=partial(_to_xla, replay=True, steps_per_execution=8))

def run(cfg):
    train,valid = datasets(make_data(cfg.model, cfg.bs, cfg.steps))
    dls = DataLoaders.from_dsets(train, valid, bs=cfg.bs, shuffle=cfg.model != 'awd_lstm', num_workers=0)
    counts,wait = no_counts,lambda: None
    if cfg.peer not in ('fastai_cpu', 'fastai_compile'):
        import torch_xla, torch_xla.core.xla_model as xm
        torch_xla.device()   # starts the client, which is no part of the first step
        if cfg.peer != 'xm_step': import fastai_xla.all
        counts,wait = xla_counts,xm.wait_device_ops
    clock = Clock(cfg, counts, wait, first=8 if cfg.peer.endswith('k8') else 1)
    cbs = rnn_cbs(2, 1) if cfg.model == 'awd_lstm' else []
    opt_func = partial(SGD, mom=.9) if uses_sgd(cfg.model) else Adam
    learn = Learner(dls, make_model(cfg.model), CrossEntropyLossFlat(), opt_func=opt_func,
                    metrics=accuracy, cbs=[*cbs, First(clock), Last(clock)])
    try: starts[cfg.peer](learn)
    except Missing as e: return clock.tell(missing=str(e))
    learn.fit(clock.epochs, lr_of(cfg.model))
    if hasattr(learn, 'detach_xla'): learn.detach_xla()
    clock.tell(score=score(getattr(learn.model, '_orig_mod', learn.model), valid, cfg.bs))
