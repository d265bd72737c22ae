"What a cell has left: numbers and texts that can be compared with those of another run"
import re
from collections import Counter
import numpy as np
import torch

sample = 2048   # Elements of a tensor that are kept
drawing = ('bernoulli bernoulli_ native_dropout normal normal_ uniform_ random_ randperm '
           'multinomial exponential_ log_normal_ rand randn').split()

def draws():
    "How often random numbers have been drawn on the XLA device, in traced code"
    import torch_xla.debug.metrics as met
    return sum(met.counter_value(f'xla::{n}') or 0 for n in drawing)

def _host(t):
    if t.device.type == 'xla':
        from fastai_xla.transfer import fetch
        t = fetch(t)   # of the tensor itself: a view of a parameter that is read makes its next update another graph
    return t.detach().as_subclass(torch.Tensor)

def summary(t):
    "Some elements of a tensor, evenly spread, its sum of squares and its shape"
    t = _host(t)
    a = (t.double() if t.is_floating_point() or t.dtype == torch.bool else t.long()).reshape(-1).numpy()
    step = max(1, len(a)//sample)
    return dict(shape=list(t.shape), norm=float(np.sqrt(np.square(a.astype(float)).sum())), some=[float(o) for o in a[::step][:sample]])

def _numbers(o):
    if isinstance(o, torch.Tensor): return _host(o).double().reshape(-1).tolist()
    if isinstance(o, (list, tuple)) or type(o).__name__ == 'L': return [n for v in o for n in _numbers(v)]
    if isinstance(o, (int, float, np.number)) and not isinstance(o, bool): return [float(o)]
    return []

def recorder(learn):
    rec = getattr(learn, 'recorder', None)
    return {n: _numbers(getattr(rec, n, [])) for n in ('losses', 'values', 'lrs', 'iters')} if rec is not None else {}

def weights(learn):
    model = learn.model
    if not hasattr(model, 'state_dict'): return {}
    return {k: summary(v) for k,v in model.state_dict().items() if isinstance(v, torch.Tensor)}

def learners(names):
    "The learners in a namespace, each under its first name"
    from fastai.learner import Learner
    found = {}
    for k,v in names.items():
        if isinstance(v, Learner) and not k.startswith('_') and id(v) not in {id(o) for o in found.values()}: found[k] = v
    return found

def state(learn):
    "Recorder and weights of a learner, or why they cannot be read"
    try: return dict(recorder=recorder(learn), weights=weights(learn))
    except Exception as e: return dict(unreadable=f'{type(e).__name__}: {str(e)[:300]}')

def cost(learn):
    "Per steady batch of the last fit, and why steps were not replayed"
    rep = learn.xla_report()
    res = {p: rep.per_batch(p) for p in ('training', 'validation') if rep.log.n_steady(p)}
    return dict(steady=res, reasons=[n for n in rep._notes() if 'for the progress bar' not in n], fallbacks=list(rep.fallbacks))

# Texts

bar = re.compile(r'.*\|[-\s█]*\|\s*[\d.]+% \[.*|\s*(Epoch \d+/\d+ :)?\s*|█+')
number = re.compile(r'(?<![\w.])[-+]?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\d+(?:[eE][-+]?\d+)?|nan|inf)(?!\w)')
noise = [(re.compile(r'\x1b\[[\d;]*m'), ''), (re.compile(r'\b\d+:\d\d(:\d\d)?\b'), 'TIME'), (re.compile(r'0x[0-9a-f]{6,}'), 'ADDRESS'),
         (re.compile(r",?\s*device='?xla(:\d+)?'?"), ''), (re.compile(r'\bxla(:\d+)?\b'), 'cpu'), (re.compile(r'\bid="?\w*"?'), ''),
         (re.compile(r'(?:[\d.]+ ?(?:ns|µs|us|ms|s|min)\b ?)+'), 'TIME'), (re.compile(r'/tmp/[\w/.-]+'), 'PATH')]

def clean(text):
    "A text without what differs from run to run: progress bars, times, addresses, the device's name"
    lines = [[p for p in line.split('\r') if not bar.fullmatch(p)] for line in text.split('\n')]
    text = '\n'.join(l[-1] for l in lines if l)
    for pattern,new in noise: text = pattern.sub(new, text)
    return text

def numbers_and_words(text):
    text = clean(text)
    return [float(n) for n in number.findall(text)],' '.join(number.sub('#', text).split())
