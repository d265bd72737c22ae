"""Replayed training is plain training, bit for bit: models by optimizers, with what is put around a step in between

`python tests/test_replay_matrix.py [model or optimizer...]` runs all combinations and prints a table;
as tests only a part of them, in which each model and each optimizer occurs."""
import os
os.environ.setdefault('XLA_COMPILATION_CACHE_SIZE', '128')
import contextlib, io, random, sys, time, warnings

import numpy as np, pandas as pd
import pytest
from fastai.callback.all import *
from fastai.tabular.all import TabularDataLoaders, tabular_learner, Categorify, FillMissing, Normalize as NormalizeTabular
from fastai.text.all import TextDataLoaders, BaseTokenizer, AWD_LSTM, awd_lstm_lm_config, language_model_learner, Perplexity
from pydoc_data.topics import topics
from common import *
from fastai_xla.all import *
from fastai_xla.cases import TransformerBlock
from fastai_xla.norm import RunningBatchNorm
from fastai_xla.convert import convert_norm
from fastai_xla.runtime import is_xla
from fastai_xla.graphs import rng_state
from fastai_xla.seeds import manual_seed
from fastai_xla.transfer import fetch

pytestmark = pytest.mark.usefixtures('recorded')

# What is left behind

def _flat(o, path=''):
    "Path -> leaf"
    if isinstance(o, dict):
        return {k: v for i,key in enumerate(o) for k,v in _flat(o[key], f'{path}.{i if isinstance(key, torch.Tensor) else key}').items()}
    if isinstance(o, (list, tuple, L)): return {k: v for i,x in enumerate(o) for k,v in _flat(x, f'{path}.{i}').items()}
    return {path: o}

def _opt_state(opt, params):
    opts = [opt, opt.opt] if isinstance(opt, (Lookahead, OptimWrapper)) else [opt]
    last = opts[-1]
    return dict(state=[last.state.get(p, {}) for p in params],
        hypers=list(last.hypers) if hasattr(last, 'hypers') else [{k: v for k,v in g.items() if k != 'params'} for g in last.param_groups],
        slow=[list(pg) for pg in getattr(opt, 'slow_weights', None) or []], count=getattr(opt, 'count', None))

def _host_rng():
    return dict(python=hash(random.getstate()), numpy=hash(np.random.get_state()[1].tobytes()),
                torch=hash(torch.get_rng_state().numpy().tobytes()))

def left_behind(learn):
    "All that training has changed, on the host, each with a name"
    ps,rec = list(learn.model.parameters()),learn.recorder
    counters = {f'{n}.{k}': v for n,m in learn.model.named_modules() for k,v in vars(m).items() if type(v) in (int, float)}
    return _flat(fetch(dict(model=dict(learn.model.state_dict()), grads=[p.grad for p in ps],
        opt=_opt_state(learn.opt, ps), counters=counters, losses=rec.losses, values=list(rec.values), lrs=rec.lrs,
        smooth=rec.smooth_loss.val if hasattr(rec, 'smooth_loss') else None,
        hps=getattr(learn, 'hps', getattr(rec, 'hps', None)), rng=rng_state(), host=_host_rng())))

def _same(a, b, tol=0.):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tol, equal_nan=True))
    if type(a) is type(b) is float and abs(a-b) <= tol*max(1, abs(a)): return True
    return type(a) == type(b) and (a == b or a != a and b != b)

def _difference(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape: return (a-b).abs().max()
    return a,b

def differences(a, b, tol=0.):
    "What of `a` is otherwise in `b`, by name"
    return ([f'{k}: only in one' for k in {*a} ^ {*b}]
            + [f'{k}: {_difference(a[k], b[k])}' for k in a if k in b and not _same(a[k], b[k], tol)])

def run(make, fit, replay):
    set_seed(0)
    manual_seed(3)
    learn = make().to_xla(replay=replay)
    with learn.no_logging(), learn.no_bar(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        fit(learn)
    return learn

def compare(make, fit, tol=0.):
    "The same story with plain and with replayed steps, from the same seeds; the learner that replayed"
    plain = left_behind(run(make, fit, False))
    learn = run(make, fit, True)
    diff = differences(plain, left_behind(learn), tol)
    assert not diff, f'{len(diff)} of {len(plain)} differ: {diff[:8]}'
    return learn

def recordings(learn): return [r for recs in learn.xla_opt.replay.kinds.recs.values() if not isinstance(recs, str) for r in recs]
def n_runs(learn): return sum(r.runs for r in recordings(learn))

# Models

n_train,n_valid,bs = 40,8,4   # two epochs are 20 steps

def _dls(x, y, tfms=None):
    dsets = Datasets(L(range(len(x))), [[x.__getitem__], [y.__getitem__]],
                     splits=[list(range(n_train)), list(range(n_train, n_train+n_valid))])
    return dsets.dataloaders(bs=bs, num_workers=0, after_batch=tfms)

def _g(): return torch.Generator().manual_seed(0)
def _randn(*sz): return torch.randn(n_train+n_valid, *sz, generator=_g())
def _randint(hi, *sz): return torch.randint(hi, (n_train+n_valid, *sz), generator=_g())
def _learner(dls, model, **kwargs): return Learner(dls, model, **(dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy) | kwargs))

def convnet_learner(tfms=None, **kwargs): return image_learner(image_dls(n_train, n_valid, bs, after_batch=tfms), **kwargs)

def running_learner(**kwargs):
    learn = convnet_learner(**kwargs)
    with contextlib.redirect_stdout(io.StringIO()): convert_norm(learn.model, 'running')
    for m in learn.model.modules():
        if isinstance(m, RunningBatchNorm): m.update_every,m.warmup = 3,30
    return learn

def dropout_learner(**kwargs):
    dls = _dls(_randn(10), _randint(4))
    return _learner(dls, nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Dropout(.3), nn.Linear(16, 8),
                                       nn.GELU(), nn.Dropout(.5), nn.Linear(8, 4)), **kwargs)

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.out = nn.Embedding(20, 8),nn.LSTM(8, 8, 2, batch_first=True, dropout=.2),nn.Linear(8, 2)
    def forward(self, x): return self.out(self.rnn(self.emb(x))[0][:,-1])

class Tied(nn.Module):
    "The embedding is the last layer, too"
    def __init__(self, n=20, d=8):
        super().__init__()
        self.emb,self.lin,self.out = nn.Embedding(n, d),nn.Linear(d, d),nn.Linear(d, n)
        self.out.weight = self.emb.weight
    def forward(self, x): return self.out(self.lin(self.emb(x)).relu())

def _tokens(model, **kwargs):
    x = _randint(20, 6)
    return _learner(_dls(x, (x.sum(1) > 57).long()), model, **kwargs)

def lstm_learner(**kwargs): return _tokens(Recurrent(), **kwargs)
def attention_learner(**kwargs): return _tokens(TransformerBlock(), **kwargs)
def tied_learner(**kwargs):
    x = _randint(20, 6)
    return _learner(_dls(x, x.flip(1)), Tied(), **kwargs)

def awd_lstm_learner(**kwargs):
    words = ' '.join(topics[k] for k in sorted(topics)).split()
    texts = [' '.join(words[i:i+100]) for i in range(0, 400, 100)]
    dls = TextDataLoaders.from_df(pd.DataFrame(dict(text=texts)), is_lm=True, text_col='text', valid_pct=.3,
                                  seed=0, tok_tfm=BaseTokenizer(), bs=4, seq_len=8, num_workers=0)
    return language_model_learner(dls, AWD_LSTM, config=awd_lstm_lm_config | dict(emb_sz=8, n_hid=8, n_layers=2),
                                  pretrained=False, metrics=[accuracy, Perplexity()], **kwargs)

def tabular(**kwargs):
    g,n = np.random.default_rng(0),n_train+n_valid
    df = pd.DataFrame(dict(job=g.choice(list('abcd'), n), age=g.normal(40, 10, n)))
    df['rich'] = np.where((df.job == 'a') | (df.age > 50), 'yes', 'no')
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, FillMissing, NormalizeTabular], cat_names='job',
                                     cont_names='age', y_names='rich', valid_idx=list(range(n_valid)), bs=bs, num_workers=0)
    return tabular_learner(dls, layers=[16,8], config=dict(ps=[.1,.2], embed_p=.1), **(dict(metrics=accuracy) | kwargs))

def unet(tfms=None, **kwargs):
    dls = _dls(TensorImage(_randn(1, 8, 8)), TensorMask(_randint(3, 8, 8)), tfms)
    body = nn.Sequential(ConvLayer(1, 4, stride=2), ConvLayer(4, 8, stride=2))
    return _learner(dls, DynamicUnet(body, 3, (8,8)), **(dict(loss_func=CrossEntropyLossFlat(axis=1), metrics=foreground_acc) | kwargs))

def bf16(**kwargs): return convnet_learner(**kwargs).to_bf16()

def augmented(**kwargs): return dict(tfms=aug_transforms(size=8, max_rotate=20., max_warp=.1)) | kwargs
def with_cb(f): return lambda **kwargs: kwargs | dict(cbs=f())

extras = dict(none=dict, clip=with_cb(lambda: GradientClip(.1)), accumulate=with_cb(lambda: GradientAccumulation(2*bs)),
              mixup=with_cb(MixUp), augment=augmented, metrics=dict)
common,classes,images = ['none', 'clip', 'accumulate', 'metrics'],['mixup'],['augment']
models = dict(batchnorm=(convnet_learner, common+classes+images), running=(running_learner, common+classes),
    dropout=(dropout_learner, common+classes), lstm=(lstm_learner, common), awd_lstm=(awd_lstm_learner, common),
    attention=(attention_learner, common), tabular=(tabular, common),
    unet=(unet, common+images), bf16=(bf16, common+classes+images), tied=(tied_learner, common))
opts = dict(sgd=SGD, momentum=partial(SGD, mom=.9), rmsprop=partial(RMSProp, mom=.9), adam=Adam, radam=RAdam,
            qhadam=QHAdam, lamb=Lamb, ranger=ranger, adamw=partial(OptimWrapper, opt=torch.optim.AdamW))

def extra_of(model, opt):
    "What is put around the step: each model has several, each with several optimizers"
    names = models[model][1]
    return names[(list(models).index(model) + list(opts).index(opt)) % len(names)]

def combination(model, opt):
    "Run it both ways; the learner that replayed, and how many batches there were"
    extra = extra_of(model, opt)
    def make():
        learn = models[model][0](**extras[extra](**dict(opt_func=opts[opt])))
        learn.recorder.train_metrics = extra == 'metrics'
        return learn
    def fit(learn): learn.fit_one_cycle(2, 1e-2)
    # a program without an update has other outputs, and on some machines XLA fuses it otherwise
    learn = compare(make, fit, tol=1e-6 if extra == 'accumulate' else 0.)
    return learn,2*(len(learn.dls.train)+len(learn.dls.valid))

# Each model, each optimizer, each extra
tested = [(m, list(opts)[(1 + 7*i + 2*(i//len(opts))) % len(opts)]) for i,m in enumerate(models)]

def test_all_occur():
    assert {m for m,_ in tested} == {*models} and {o for _,o in tested} == {*opts} and {extra_of(*t) for t in tested} == {*extras}
    assert {(m, extra_of(m, o)) for m in models for o in opts} == {(m, e) for m in models for e in models[m][1]}

@pytest.mark.parametrize('model,opt', tested)
def test_same_as_plain(model, opt):
    learn,n = combination(model, opt)
    why = learn.xla_opt.replay.reasons.why
    # the first batch sets it up for its batch size
    if model == 'awd_lstm':
        assert all('bs changes' in w or 'not the same' in w for w in why) and n_runs(learn) >= n-3, (why, n_runs(learn), n)
    else: assert not why and n_runs(learn) == n and len(recordings(learn)) <= 8, (why, n_runs(learn), n)

def test_control():
    "The comparison sees one step with another learning rate, and another random draw"
    def other(learn):
        learn.fit(1, 1e-2)
        learn.fit(1, 1.0001e-2)
    def same(learn): learn.fit(1, 1e-2); learn.fit(1, 1e-2)
    make = lambda: dropout_learner(opt_func=SGD)
    a,b,c = (left_behind(run(make, f, r)) for f,r in ((same, False), (other, True), (same, True)))
    assert differences(a, b) and not differences(a, c)

def table(only):
    print(f'{"":10s} {" ".join(f"{o:>10s}" for o in opts)}', flush=True)
    for m in models:
        print(f'{m:10s}', end=' ', flush=True)
        why,bad = {},[]
        for o in opts:
            if only and m not in only and o not in only:
                print(f'{"":>10s}', end=' ')
                continue
            try:
                learn,n = combination(m, o)
                res = 'same' if n_runs(learn) == n else f'{n_runs(learn)}/{n}'
                if learn.xla_opt.replay.reasons.why: why[o] = dict(learn.xla_opt.replay.reasons.why)
            except Exception as e:
                res = 'OTHER' if isinstance(e, AssertionError) else 'ERROR'
                bad.append(f'{o} with {extra_of(m, o)}: {type(e).__name__} {str(e)[:1500]}')
            print(f'{res:>10s}', end=' ', flush=True)
        print()
        for o,w in why.items(): print(f'    {o} with {extra_of(m, o)}: {w}')
        for b in bad: print('   ', b, flush=True)

if __name__ == '__main__':
    start = time.process_time()
    table(sys.argv[1:])
    print(f'{time.process_time()-start:.0f} s of CPU')
