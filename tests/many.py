"""What a learner becomes on N virtual devices: `python -m tests.many N file.pt 'spec' ...`

In a process of its own: N is said before the client starts.

A spec is `case` or `case/fsdp/plain/2`: a model below or a case of the coverage table, parameters split, no replay, two steps as one.
`ghost` and `whole` are faults: BatchNorm that sees a quarter of the batch, labels that each device gets all of."""
import os, sys, warnings
n = int(sys.argv[1]) if __name__ == '__main__' else 0
if n: os.environ.update(CPU_NUM_DEVICES=str(n), PJRT_DEVICE='CPU')
warnings.filterwarnings('ignore')
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla import cases
from fastai_xla.cases import groups
from fastai_xla.mesh import layout
import fastai_xla.transfer
from fastai_xla import mesh
from fastai_xla.runtime import met, xla_counts
from fastai_xla.transfer import fetch, send_batch
from fastai_xla.capture.state import flatten

class Kept(Callback):
    "Losses of all batches, and what each has cost"
    order = 1001
    def before_fit(self): self.losses,self.valid,self.counts = [],[],[]
    def after_batch(self):
        (self.losses if self.training else self.valid).append(self.learn.loss.detach())
        if self.training: self.counts.append(xla_counts())

class Words(nn.Module):
    "A transformer of two layers, with dropout"
    def __init__(self, n=20, d=16):
        super().__init__()
        self.emb,self.out = nn.Embedding(n, d),nn.Linear(d, 2)
        layer = nn.TransformerEncoderLayer(d, 2, 32, dropout=.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    def forward(self, x): return self.out(self.blocks(self.emb(x)).mean(1))

def words():
    learn = cases.tokens()
    learn.model = Words()
    return learn

def sizes(n):
    "Batches of `n` images; in validation another one of half as many"
    g = torch.Generator().manual_seed(0)
    total = 2*n + n + -(-n//2)
    x = TensorImage(torch.rand(total, 3, 16, 16, generator=g))
    dls = cases._dls(x, TensorCategory(torch.randint(4, (total,), generator=g)), bs=n, n_valid=total-2*n)
    return Learner(dls, cases._convnet(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)

def unet():
    "With SGD: Adam makes of rounding, where a true gradient is zero as in the biases before BatchNorm, whole steps"
    return cases.unet(opt_func=SGD)

models = dict(**{f'batch{n}': partial(sizes, n) for n in (50, 18, 3, 1)},
    images=cases.images, convnet=lambda: cases.images(aug_transforms(size=24)), tabular=cases.tabular,
    text=partial(cases.language_model, 10, n_layers=1), unet=unet, words=words)
others = {f'{g}:{c.name}': c for g,cs in groups.items() for c in cs}

class Ghost(nn.BatchNorm2d):
    "BatchNorm whose statistics are those of a quarter of the batch, as on devices that do not speak to each other"
    def forward(self, x): return torch.cat([super(Ghost, self).forward(o) for o in x.chunk(4)])

def ghosts(model):
    for m in model.modules():
        if type(m) is nn.BatchNorm2d: m.__class__ = Ghost

def whole_labels():
    split = mesh.batch_shardings
    fastai_xla.transfer.batch_shardings = lambda ts: [[o if t.dim() > 1 else None for t,o in zip(ts, found)] for found in split(ts)]

def sent(learn):
    "Bytes that the first batch has, and that are sent for it"
    b = next(iter(learn.dls.train.new(device='cpu', shuffle=False, after_batch=noop, num_workers=0)))
    ts = [t.contiguous() for t in flatten(b)[0] if isinstance(t, torch.Tensor)]
    before = met.metric_data('OutboundData')[1]
    fetch(send_batch(ts, learn.xla_opt.device))
    return sum(t.nbytes for t in ts),met.metric_data('OutboundData')[1]-before

def state(learn):
    opt = getattr(learn.opt, 'opt', learn.opt)
    if opt is None: return dict(learn.model.state_dict()),{}
    states = [(f'{i}.{k}', t) for i,st in enumerate(opt.state.values()) if isinstance(st, dict) for k,t in st.items()]
    return dict(learn.model.state_dict()),{k: t for k,t in states if isinstance(t, torch.Tensor) and t.device.type == 'xla'}

def run(spec):
    name,*how = spec.split('/')
    set_seed(0)
    case = others.get(name)
    learn = (case.make if case else models[name])()
    if 'ghost' in how: ghosts(learn.model)
    if 'whole' in how: whole_labels()
    kept = Kept()
    learn.add_cb(kept)
    learn.to_xla(devices='all', shard='fsdp' if 'fsdp' in how else None, replay='plain' not in how and 'auto',
                 steps_per_execution=2 if '2' in how else 1)
    manual_seed(7)
    before = xla_counts()
    with learn.no_bar(), learn.no_logging(): case.run(learn) if case else learn.fit(1, 1e-3)
    weights,inner = state(learn)
    steps = [b-a for a,b in zip(kept.counts, kept.counts[1:])][-4:]
    return dict(losses=fetch(kept.losses), valid=fetch(kept.valid), values=[list(v) for v in learn.recorder.values],
                weights=fetch({k: v.detach() for k,v in weights.items()}), state=fetch(inner),
                layouts={k: layout(t) for k,t in (weights|inner).items()},
                compiles=(xla_counts()-before).compiles, steady=[(c.compiles, c.executions, c.to_host-c.looks) for c in steps],
                sent=sent(learn))

if __name__ == '__main__':
    res = {}
    for spec in sys.argv[3:]:
        try: res[spec] = run(spec)
        except Exception as e: res[spec] = f'{type(e).__name__}: {e}'
        print(spec, res[spec] if isinstance(res[spec], str) else res[spec]['values'], flush=True)
    torch.save(res, sys.argv[2])
