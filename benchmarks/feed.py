"""Loading beside training: a slow loader beside a slow step, and a loader that is all Python

With and without reading ahead, in one run, interleaved.

    PJRT_DEVICE=CPU python benchmarks/feed.py --rounds 7"""
import time
from torch import nn
from fastcore.script import call_parse
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.data import feed

class Images:
    "Noise, at `wait` seconds of waiting in each batch of `bs` and `work` rounds of Python per image"
    def __init__(self, n, bs, size, wait=0., work=0):
        store_attr()
        self.x = TensorImage(torch.randint(0, 256, (64, 3, size, size), dtype=torch.uint8))
    def __len__(self): return self.n
    def __getitem__(self, i):
        if self.wait and i%self.bs == 0: time.sleep(self.wait)
        sum(range(self.work))
        return self.x[i%64],TensorCategory(i%10)

def stock(dl):
    "`dl` read as fastai does it, by the training thread"
    class Stock(type(dl)):
        def __iter__(self): return super().__iter__()
    return dl.new(cls=Stock)

def ms(f, n):
    t = time.perf_counter()
    f()
    sync(wait=True)
    return (time.perf_counter()-t)/n*1e3

@call_parse
def main(
    rounds:int=7, # Rounds to take the median of
    batches:int=96, # Batches in a round: the first is not read beside a step
    bs:int=32, # Images in a batch
    size:int=64, # Pixels
    load:float=15., # Milliseconds of waiting in the loader, per batch
    nf:int=16, # Filters, for a step of about as long
):
    n = batches*bs
    def dl(wait=0., work=0, n=n):
        return TfmdDL(Images(n, bs, size, wait, work), bs=bs, num_workers=0,
                      after_batch=[IntToFloatTensor, Normalize.from_stats(*imagenet_stats, cuda=False)])
    slow,quick,python = dl(wait=load/1e3),dl(),dl(work=30000)
    model = nn.Sequential(ConvLayer(3, nf, stride=2), ConvLayer(nf, nf), ConvLayer(nf, nf),
                          nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(nf, 10))
    learn = Learner(DataLoaders(quick, dl(n=bs)), model, loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=1e-3).to_xla()
    learn.remove_cb(ProgressCallback)
    def fit(d):
        d.to(learn.dls.device)
        learn.dls.loaders[0] = d
        with learn.no_logging(): learn.fit(1)
    runs = {'loader': lambda: [None for _ in feed(slow)], 'step': lambda: fit(quick), 'both': lambda: fit(slow),
            'both, stock': lambda: fit(stock(slow)), 'python': lambda: fit(python), 'python, stock': lambda: fit(stock(python))}
    slow.to(device())
    times = {k: [] for k in runs}
    for i in range(rounds+1):
        for k,f in runs.items():
            t = ms(f, batches)
            if i: times[k].append(t)
    med = {k: sorted(v)[len(v)//2] for k,v in times.items()}
    print(', '.join(f'{k} {v:.1f} ms' for k,v in med.items()))
    print(f"a slow loader beside a slow step takes {med['both']/max(med['loader'], med['step']):.2f} of the "
          f"larger of the two ({med['both, stock']/max(med['loader'], med['step']):.2f} as stock fastai reads it)")
    print(f"a loader that is all Python: {med['python']/med['python, stock']:.2f} of stock fastai's time")
