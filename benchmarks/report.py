"""What the cost log for `learn.xla_report()` add to a step, and what a watched fit costs: interleaved, in one run

    PJRT_DEVICE=CPU python benchmarks/report.py --rounds 15"""
import time, statistics
import torch
from fastcore.script import call_parse
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.explain import XLAReportCallback
from fastai_xla.report import CostLog

class NoLog(CostLog):
    "Books that nobody keeps"
    def between(self, where): pass
    def batch(self, phase, where, recorded=False): pass

class Clock(Callback):
    "Seconds of the training batches of a fit"
    def before_train(self): self.start = time.perf_counter()
    def after_train(self):
        sync(wait=True)
        self.seconds = time.perf_counter()-self.start

def learner(bs, size, n):
    x,y = TensorImage(torch.randn(n, 1, size, size)),TensorCategory(torch.randint(10, (n,)))
    dls = Datasets(L(range(n)), [[x.__getitem__], [y.__getitem__]], splits=[list(range(n)), []]).dataloaders(bs=bs, num_workers=0)
    model = nn.Sequential(ConvLayer(1, 16, stride=2), ConvLayer(16, 32, stride=2),
                          ConvLayer(32, 32, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(32, 10))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=Clock())
    return learn.remove_cb(ProgressCallback)

def fit(learn, log, cbs=None):
    learn.xla_opt.log = log
    with learn.no_logging(): learn.fit(1, 1e-3, cbs=cbs)
    return learn.clock.seconds/len(learn.dls.train)*1e3

@call_parse
def main(
    rounds:int=15, # Fits of each kind
    bs:int=64, # Images in a batch
    size:int=28, # Pixels
    batches:int=40, # Batches of a fit
):
    for replay in ('auto', False):
        learn = learner(bs, size, bs*batches).to_xla(replay=replay)
        on,off = CostLog(),NoLog()
        for _ in range(2): fit(learn, on), fit(learn, off)
        pairs = [(fit(learn, on), fit(learn, off)) if i%2 else (fit(learn, off), fit(learn, on))[::-1] for i in range(rounds)]
        ratios = sorted(a/b for a,b in pairs)
        ons,offs = (statistics.median(p[i] for p in pairs) for i in (0, 1))
        print(f"replay={replay}: {ons:.3f} ms a step with the cost log, {offs:.3f} without; median ratio "
              f"{statistics.median(ratios):.4f}, fastest against fastest {min(a for a,_ in pairs)/min(b for _,b in pairs):.4f}")
    t = time.perf_counter()
    for _ in range(500): on.batch('training', 'epoch 0, batch 0')
    print(f"the cost log of one batch: {(time.perf_counter()-t)*2e3:.1f} us")
    print(f"watched (XLAReportCallback): {fit(learn, on, XLAReportCallback()):.1f} ms a step")
