"""`locate_fault` on five models: no alarm without a fault; the right layer, phase and backend with one

    PJRT_DEVICE=CPU python benchmarks/locate.py --seeds 5
    PJRT_DEVICE=CPU python benchmarks/locate.py --seeds 5 --precision default --eps .05    # with products as on a TPU"""
import time
from fastcore.script import call_parse
from fastai.vision.all import *
from fastai.text.all import AWD_LSTM, LinearDecoder, SequentialRNN, get_language_model
from fastai.tabular.all import TabularModel
from fastai_xla.parity.locate import locate_fault
from fastai_xla.precision import tpu_numerics

class Pred(Module):
    "The predictions of a language model, without what its regularisers want"
    def __init__(self, model): self.model = model
    def forward(self, x): return self.model(x)[0]

def ce(pred, y): return F.cross_entropy(pred.view(-1, pred.shape[-1]), y.view(-1))

def xresnet(): return xresnet18(n_out=10),(torch.randn(4, 3, 32, 32), torch.randint(10, (4,))),ce
def awd_lstm():
    config = dict(emb_sz=24, n_hid=32, n_layers=2, pad_token=1, bidir=False, output_p=.1, hidden_p=.1,
                  input_p=.1, embed_p=.1, weight_p=.1, tie_weights=True, out_bias=True)
    model = get_language_model(AWD_LSTM, 100, config=config)
    return Pred(model),(torch.randint(100, (4, 10)), torch.randint(100, (4, 10))),ce
class Block(Module):
    def __init__(self, d=32):
        self.emb = nn.Embedding(50, d)
        self.attn = nn.TransformerEncoderLayer(d, 4, 64, batch_first=True, norm_first=True)
        self.out = nn.Linear(d, 50)
    def forward(self, x): return self.out(self.attn(self.emb(x)))
def transformer(): return Block(),(torch.randint(50, (4, 12)), torch.randint(50, (4, 12))),ce
def unet():
    body = nn.Sequential(*list(xresnet18(n_out=10).children())[:6])
    model = DynamicUnet(body, 3, (32, 32), self_attention=True)
    return model,(torch.randn(2, 3, 32, 32), torch.randint(3, (2, 32, 32))),lambda p, y: F.cross_entropy(p, y)
class Tab(TabularModel):
    def forward(self, xs): return super().forward(*xs)
def tabular():
    model = Tab([(10,4), (7,3)], 5, 3, [32,16], ps=.1, embed_p=.1)
    xs = (torch.stack([torch.randint(10, (16,)), torch.randint(7, (16,))], 1), torch.randn(16, 5))
    return model,(xs, torch.randint(3, (16,))),ce

models = dict(xresnet18=xresnet, awd_lstm=awd_lstm, transformer=transformer, unet=unet, tabular=tabular)

class Scaled(torch.autograd.Function):
    "The identity, with a gradient that is wrong by `eps`"
    @staticmethod
    def forward(ctx, x, eps):
        ctx.eps = eps
        return x.clone()
    @staticmethod
    def backward(ctx, g): return g*(1+ctx.eps),None

def plant(module, backend, eps, phase):
    "Let `module` be wrong by `eps` in float32 on `backend`"
    orig = module.forward
    def wrong(t):
        if not isinstance(t, Tensor) or t.dtype != torch.float32 or t.device.type != backend: return t
        return t*(1+eps) if phase == 'forward' else Scaled.apply(t, eps)
    def forward(*args, **kwargs):
        out = orig(*args, **kwargs)
        return tuple(wrong(t) if isinstance(t, Tensor) else t for t in out) if isinstance(out, tuple) else wrong(out)
    module.forward = forward

def candidates(model):
    "Modules whose results count: with parameters, or an activation, or blocks of several modules"
    return [(n, m) for n,m in model.named_modules() if n
            and not isinstance(m, (nn.Sequential, nn.ModuleList, nn.Identity,
                                   nn.modules.linear.NonDynamicallyQuantizableLinear, MergeLayer, ResizeToOrig))]

def searched(model, batch, loss, precision):
    with tpu_numerics(precision): return locate_fault(model, batch, loss)

def no_alarms(name, seeds, precision):
    times,alarms = [],[]
    for s in range(seeds):
        set_seed(s, reproducible=True)
        model,batch,loss = models[name]()
        t = time.time()
        f = searched(model, batch, loss, precision)
        times.append(time.time()-t)
        if f: alarms.append(f)
    return alarms,max(times),f.n_calls

def found(name, layer_seed, backend, eps, phase, precision):
    set_seed(layer_seed, reproducible=True)
    model,batch,loss = models[name]()
    calls = set(locate_paths(model, batch, loss))
    g = random.Random(layer_seed)
    path,module = g.choice([(n, m) for n,m in candidates(model) if n in calls])
    plant(module, backend, eps, phase)
    t = time.time()
    f = searched(model, batch, loss, precision)
    return bool(f) and (f.path,f.backend,f.phase) == (path,backend,phase),path,type(module).__name__,f,time.time()-t

def locate_paths(model, batch, loss):
    from fastai_xla.parity.calls import note_calls
    return [c.path for c in note_calls(model, batch[:-1], batch[-1:], loss) if any(g.abs().max() > 0 for g in c.grads.values())]

@call_parse
def main(
    seeds:int=5, # Seeds without a fault, and layers with one
    names:str='', # Some of the models, with commas between
    precision:str='highest', # What matrix products keep, as on a TPU
    eps:float=None, # Size of the faults; 1e-3 and 1e-4 by default
    verbose:bool=False, # Tell each layer?
):
    total,right,slow = 0,0,0.
    for name in names.split(',') if names else models:
        alarms,t,n = no_alarms(name, seeds, precision)
        print(f'{name}: {n} calls, {len(alarms)} alarms in {seeds} seeds without a fault, at most {t:.1f} s', *alarms, flush=True)
        for layer in range(seeds):
            for i,(backend,phase) in enumerate((b, p) for b in ('cpu', 'xla') for p in ('forward', 'backward')):
                size = eps or (1e-3 if (layer+i)%2 else 1e-4)
                ok,path,kind,f,t = found(name, layer, backend, size, phase, precision)
                total,right,slow = total+1,right+ok,max(slow, t)
                if verbose or not ok:
                    print(f"  {'found ' if ok else 'MISSED'} {size} {phase} on {backend} in {path} ({kind}): {f.verdict}", flush=True)
        print(f'  so far {right} of {total} named rightly, at most {slow:.1f} s', flush=True)
