"fastai.text on XLA: the contract for language models and classifiers, and the CPU's numbers"
from contextlib import contextmanager
from functools import partial
from pydoc_data.topics import topics
import re
import pytest, torch
from fastai.text.all import *
from fastai_xla.all import *
from fastai_xla.runtime import *
from fastai_xla.graphs import hlo_text
from fastai_xla.seeds import manual_seed
from fastai_xla.transfer import *
from fastai_xla.lowerings.core import register_lowerings
import fastai_xla.lowerings.norm, fastai_xla.lowerings.rnn, fastai_xla.compat.text
from fastai_xla.compat.text import text_lengths, _pad_chunk
from fastai_xla.parity.truth import HostDraws
from probe import *

device()
register_lowerings()
texts = [topics[k] for k in sorted(topics)]
plain = dict(hidden_p=0., input_p=0., embed_p=0., weight_p=1e-9, output_p=0.)   # no dropout; fastai's own WeightDropout fails at 0
small = dict(emb_sz=20, n_hid=30)
one_layer = plain | dict(n_layers=1)   # where it is not the model that is tested

def lm_dls(n=10, bs=8, seq_len=24, valid_pct=.3):
    return TextDataLoaders.from_df(pd.DataFrame(dict(text=texts[:n])), is_lm=True, text_col='text',
                                   valid_pct=valid_pct, seed=0, tok_tfm=BaseTokenizer(), bs=bs, seq_len=seq_len)

def lm_learner(path='.', dls=None, config=plain, **kwargs):
    set_seed(0)
    learn = language_model_learner(dls or lm_dls(), AWD_LSTM, config=awd_lstm_lm_config | small | config,
                                   pretrained=False, metrics=[accuracy, Perplexity()], path=path, **kwargs)
    return learn.remove_cb(ProgressCallback)

def clas_dls(n=160, bs=8, seq_len=24, spread=8, shortest=20):
    words = ' '.join(texts).split()
    lens = [int(shortest*spread**(i*37%n/n)) for i in range(n)]
    df = pd.DataFrame(dict(text=[' '.join(words[i*200:i*200+k]) for i,k in enumerate(lens)], label=[i%2 for i in range(n)]))
    return TextDataLoaders.from_df(df, valid_pct=.25, seed=0, text_col='text', label_col='label',
                                   tok_tfm=BaseTokenizer(), bs=bs, seq_len=seq_len, min_freq=1)

def clas_learner(path='.', dls=None, config=plain, **kwargs):
    set_seed(0)
    learn = text_classifier_learner(dls or clas_dls(), AWD_LSTM, seq_len=24, config=small | dict(n_layers=2) | config,
                                    pretrained=False, metrics=accuracy, path=path, **kwargs)
    return learn.remove_cb(ProgressCallback)

def fit(learn, *args, **kwargs):
    set_seed(1)
    with learn.no_logging(): learn.fit_one_cycle(*args, **kwargs)
    return learn

@pytest.mark.parametrize('config', [{}, dict(bidir=True)], ids=['dropout', 'bidir'])
def test_lm_contract(config):
    "One execution and nothing else per batch; the short batch at the end of the data is one graph more, once"
    learn = fit(lm_learner(config=config, cbs=Probe()).to_xla(), 2, 1e-2)
    short = {True: len(learn.dls.train)-1, False: len(learn.dls.valid)-1}
    costs = [(t, i, c) for t,i,c in learn.probe.rows]
    last = [c for t,i,c in costs if i == short[t]]
    assert [c.compiles for c in last] == [1,1,0,0]
    for train in (True,False):
        # the second and third are recorded and looked at
        steady = [c for t,i,c in costs if t == train and 0 < i < short[t]][2 if train else 1:]
        steady = [c for c in steady if not c.audited]
        assert len(steady) >= 8 and not breaches(steady), breaches(steady)

def test_lm_parity():
    "Losses of each step, perplexity and weights after an epoch are the CPU's"
    cpu,xla = fit(lm_learner(), 1, 1e-2),fit(lm_learner().to_xla(), 1, 1e-2)
    for a,b in zip(cpu.recorder.losses, xla.recorder.losses, strict=True): assert abs(a-b) < 1e-4*a
    for a,b in zip(cpu.recorder.values[0], xla.recorder.values[0], strict=True): assert abs(a-b) < 1e-3*max(1, a)
    for a,b in zip(cpu.model.parameters(), fetch(list(xla.model.parameters()))): assert (a-b).abs().max() < 1e-2

strong = dict(weight_p=.5, hidden_p=.5, input_p=.5, embed_p=.3, output_p=.5)

def test_lm_dropout_of_the_same_draws():
    "Where the CPU draws for both, dropout acts in the same places and with the same strength; the control has none"
    def run(xla, config):
        learn = lm_learner(config=config)
        if xla: learn.to_xla(replay=False)
        with HostDraws(): rec = fit(learn, 1, 3e-2).recorder
        return torch.stack([torch.as_tensor(l) for l in rec.losses])
    cpu,xla,none = run(False, strong),run(True, strong),run(False, plain)
    assert len(cpu) > 10 and ((cpu-xla).abs() < 1e-4*cpu).all(), (cpu, xla)
    assert (cpu-none).abs().max() > .01*cpu.max()

def test_lm_dropout():
    "With draws of its own XLA's losses are nearer to the CPU's than those without dropout are, which are lower"
    def run(xla, config):
        learn = lm_learner(dls=lm_dls(32, valid_pct=.2), config=config)
        if xla: learn.to_xla()
        return torch.stack(list(fit(learn, 1, 3e-2).recorder.losses))[-50:].mean()
    cpu,xla,none = run(False, strong),run(True, strong),run(False, plain)
    assert abs(cpu-xla) < .5*(min(cpu, xla)-none), (cpu, xla, none)

def test_classifier_contract():
    "A graph for each length, all in the first epoch; lengths have no other say"
    learn = fit(clas_learner(dls=clas_dls(n=96, shortest=10, spread=5), config={}, cbs=Probe()).to_xla(), 2, 1e-2)
    n = len(learn.dls.train)+len(learn.dls.valid)
    first,second = learn.probe.rows[:n],learn.probe.rows[n:]
    assert len(first) == len(second) == n
    graphs = lambda rows, train: sum(c.compiles for t,_,c in rows if t == train)
    # three lengths; the first step may differ
    assert 1 < graphs(first, True) <= 4 and 1 < graphs(first, False) <= 4, (graphs(first, True), graphs(first, False))
    replayed = lambda rows: [c for *_,c in rows if not c.traced]   # a batch that is traced to be recorded reads its constants
    assert not breaches(replayed(second)), breaches(replayed(second))
    assert sum(c.traced and not c.audited for *_,c in learn.probe.rows) <= 2*graphs(first, True) + 2*graphs(first, False)
    assert all(c.executions == 1 and not c.to_host-c.looks and not c.fallbacks for c in replayed(first))

def on_cpu(batches): return [tuple(t.as_subclass(torch.Tensor).cpu() for t in b) for b in batches]

def test_classifier_parity():
    "Predictions and a step's gradients for batches in whole chunks are the CPU's"
    xla,cpu = clas_learner().to_xla(),clas_learner()
    for b in list(xla.dls.valid)[::2]:
        assert b[0].shape[1]%24 == 0
        x,y = on_cpu([b])[0]
        def run(model, x, y):
            pred = model.eval()(x)[0]
            return [pred.detach(), *torch.autograd.grad(F.cross_entropy(pred, y), list(model.parameters()))]
        for a,b in zip(fetch(run(xla.model, *(t.as_subclass(torch.Tensor) for t in b))), run(cpu.model, x, y), strict=True):
            assert (a-b).abs().max() < 1e-5*max(1, b.abs().max())

def test_texts_shorter_than_a_chunk():
    "The classifier pools the last 72 columns of batches that have 24"
    dls = clas_dls(n=40, spread=1)
    losses = []
    for on_xla in (False, True):
        set_seed(0)
        learn = text_classifier_learner(dls, AWD_LSTM, config=small | dict(n_layers=1) | plain,
                                        pretrained=False).remove_cb(ProgressCallback)
        losses.append(float((learn.to_xla() if on_xla else learn).validate()[0]))
    test_close(*losses, eps=1e-5)

def test_padding():
    "Texts keep their tokens in their order; lengths are few and from the list"
    dls = clas_dls()
    want = {tuple(o.tolist()) for o,_ in dls.valid.dataset}
    dls.to(device())
    batches = on_cpu(dls.valid)
    assert {tuple(r[r != 1].tolist()) for x,_ in batches for r in x} == {tuple(t for t in o if t != 1) for o in want}
    assert {x.shape[1] for x,_ in batches} <= set(text_lengths(dls.valid.res, 24))

def test_cpu_padding_is_stock():
    "On the CPU a batch is as long as its longest text"
    for x,_ in clas_dls().valid: assert (x != 1).sum(1).max() == x.shape[1]

def test_max_len():
    "The outputs of the last `max_len` tokens, as on the CPU"
    set_seed(0)
    enc = SentenceEncoder(4, AWD_LSTM(20, 6, 6, 1, **{k: v for k,v in plain.items() if k != 'output_p'}), max_len=8).eval()
    x = torch.stack([pad_chunk(torch.randint(2, 20, (n,)), seq_len=4, pad_len=16) for n in (16,9,3)])
    want = enc(x)
    got = fetch(enc.to(device())(x.to(device())))
    assert torch.equal(got[1], want[1]) and (got[0]-want[0]).masked_fill(want[1][...,None], 0).abs().max() < 1e-6

def keeps_some(lens, max_len): return any(max(lens)-i <= max_len for i in range(0, max(lens), 8))   # else fastai itself has an error

of_lens = (61, 45, 20, 3), (64, 33, 32, 31), (40, 40, 39, 1), (17, 9, 8, 2), (30, 29, 5)

@pytest.mark.parametrize('lens,max_len', [(l, m) for l in of_lens for m in (1, 7, 8, 16, 20, 24, 60) if keeps_some(l, m)])
def test_max_len_counts_from_the_longest_text(lens, max_len):
    "A dataloader on XLA pads to a few lengths; fastai keeps what is near the end of the longest text"
    def encoder():
        torch.manual_seed(0)
        return SentenceEncoder(8, AWD_LSTM(20, 6, 6, 1, **{k: v for k,v in plain.items() if k != 'output_p'}), max_len=max_len).eval()
    texts = [torch.randint(2, 20, (n,), generator=torch.Generator().manual_seed(n)) for n in lens]
    def results(on, n):
        "What is kept of each text, and the gradients of it"
        m = encoder().to(on)
        out,mask = m(torch.stack([_pad_chunk(t, pad_idx=1, seq_len=8, pad_len=n) for t in texts]).to(on))
        grads = torch.autograd.grad(out.masked_fill(mask[...,None], 0).square().sum(), list(m.parameters()))
        out,mask,*grads = fetch([out.detach(), mask, *grads])
        return [o[~k] for o,k in zip(out, mask)] + grads
    want = results('cpu', max(lens))
    for padded in (max(lens), -(-max(lens)//8)*8, -(-max(lens)//8)*8 + 24):
        for a,b in zip(results(device(), padded), want, strict=True):
            assert a.shape == b.shape and torch.allclose(a, b, atol=2e-6, rtol=1e-4)

def same(a, b): return all(torch.equal(p, q) for p,q in zip(fetch(list(a.parameters())), fetch(list(b.parameters())), strict=True))

def no_xla(path): return b'xla' not in Path(path).read_bytes()

def test_encoder(tmp_path):
    "An encoder that was saved on XLA loads on the CPU, and the other way round"
    xla = fit(lm_learner(tmp_path, config=one_layer).to_xla(), 1, 1e-2)
    xla.save_encoder('a')
    assert no_xla(tmp_path/'models/a.pth')
    cpu = lm_learner(tmp_path, config=one_layer)
    cpu.load_encoder('a')
    assert same(cpu.model[0], xla.model[0])
    cpu.save_encoder('b')
    again = lm_learner(tmp_path, config=one_layer).to_xla()
    again.load_encoder('b')
    assert same(cpu.model[0], again.model[0]) and is_xla(again.model[0].encoder.weight)
    fit(again, 1, 1e-2)
    assert not same(cpu.model[1], again.model[1])

def test_save_and_load(tmp_path):
    xla = fit(lm_learner(tmp_path, config=one_layer).to_xla(), 1, 1e-2)
    xla.save('m')
    other = lm_learner(tmp_path, config=one_layer).to_xla()
    other.load('m')
    assert same(xla.model, other.model)
    fit(other, 1, 1e-2)

def test_pretrained(tmp_path):
    "Weights and their vocabulary load into a model on XLA"
    learn = lm_learner(tmp_path)
    learn.save('w', with_opt=False)
    save_pickle(tmp_path/'models/w.pkl', learn.dls.vocab)
    xla = lm_learner(tmp_path)
    with torch.no_grad(): [p.zero_() for p in xla.model.parameters()]
    xla.to_xla()
    xla.load_pretrained(tmp_path/'models/w.pth', tmp_path/'models/w.pkl')
    # the words that fill the vocabulary up to a multiple of 8 share a row
    real = [i for i,w in enumerate(learn.dls.vocab) if w != 'xxfake']
    for p,q in zip(fetch(list(xla.model.parameters())), learn.model.parameters(), strict=True):
        assert torch.equal(p[real], q[real]) if len(p) == len(learn.dls.vocab) else torch.equal(p, q)

def test_export(tmp_path):
    learn = fit(clas_learner(tmp_path, clas_dls(n=40, spread=1), one_layer).to_xla(), 1, 1e-2)
    want = learn.predict('for each item in the list')
    learn.export(tmp_path/'e.pkl')
    assert no_xla(tmp_path/'e.pkl')
    got = load_learner(tmp_path/'e.pkl').predict('for each item in the list')
    assert want[0] == got[0] and (want[2]-got[2]).abs().max() < 1e-5

def test_predict(tmp_path):
    "A language model writes on, and is on XLA again"
    learn = fit(lm_learner(tmp_path, config=one_layer).to_xla(), 1, 1e-2)
    with count_xla() as n: text = learn.predict('for each item', n_words=5, no_bar=True)
    assert n.compiles <= 2 and len(text.split()) >= 8
    assert is_xla(learn.model[0].encoder.weight) and len(learn.xla_opt.log.__dict__)
    fit(learn, 1, 1e-2)

def test_stock_encoder_looks():
    "Without the patch each chunk reads the device"
    enc = SentenceEncoder(4, AWD_LSTM(20, 6, 6, 1)).eval().to(device())
    x = torch.stack([pad_chunk(torch.arange(2, n+2), seq_len=4, pad_len=16) for n in (16,9,3)]).to(device())
    with count_xla() as n:
        enc(x)
        sync()
    assert not n.to_host
    with count_xla() as n: enc._under_forward(x)
    assert n.to_host >= 4

# One look-up for all chunks

config = dict(emb_sz=8, n_hid=12, n_layers=2, pad_token=1, bidir=False)
drops = dict(hidden_p=.3, input_p=.4, embed_p=.3, weight_p=.5, output_p=.4)

def clas_model(max_len=72*20, **kwargs):
    set_seed(0)
    return get_text_classifier(AWD_LSTM, 50, 2, seq_len=8, config=config | drops | kwargs, max_len=max_len)

def tokens(chunks, bs=6, short=True):
    "Texts of many lengths, or of whole chunks"
    g = torch.Generator().manual_seed(0)
    lens = [8*chunks - (short and i%8*(chunks-1)) for i in range(bs)]
    return torch.stack([pad_chunk(torch.randint(2, 50, (n,), generator=g), seq_len=8, pad_len=8*chunks) for n in lens])

@contextmanager
def each_chunk(monkeypatch):
    "Each chunk is embedded on its own, as by fastai"
    with monkeypatch.context() as m:
        m.setattr(fastai_xla.compat.text, '_plain_embedding', lambda module: None)
        yield

def grads_of(model, x):
    "Predictions, and gradients of all that is trained"
    pred = model(x)[0]
    F.cross_entropy(pred, torch.arange(len(x), device=x.device)%2).backward()
    return [pred.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]

def on_xla(model, x):
    torch.manual_seed(3)   # one that XLA's draws follow
    manual_seed(3)
    return grads_of(model.to(device()), x.to(device()))

def n_scatters(ts): return len(re.findall(r'f32\[50,8\]\S* scatter\(', hlo_text(ts)))

@pytest.mark.parametrize('chunks', [1, 3])
def test_one_scatter_of_the_embedding(chunks, monkeypatch):
    "The gradient of the embedding is put together once, however many chunks a text has"
    assert n_scatters(on_xla(clas_model(), tokens(chunks))) == 1
    with each_chunk(monkeypatch): assert n_scatters(on_xla(clas_model(), tokens(chunks))) == chunks

def frozen(model):
    model[0].module.encoder.weight.requires_grad_(False)
    return model

@pytest.mark.parametrize('chunks,make', [(1, clas_model), (3, clas_model), (3, lambda: clas_model().eval()),
    (3, lambda: clas_model(embed_p=0.)), (3, lambda: frozen(clas_model())),
    (3, lambda: clas_model(max_len=16)), (3, lambda: clas_model(bidir=True))],
    ids=['one', 'three', 'eval', 'no_dropout', 'frozen', 'max_len', 'bidir'])
def test_look_up_for_all_chunks(chunks, make, monkeypatch):
    "The numbers are those of chunks that are embedded one by one: same draws in the same order, same rows, same gradients"
    here = fetch(on_xla(make(), tokens(chunks)))
    with each_chunk(monkeypatch): want = fetch(on_xla(make(), tokens(chunks)))
    assert torch.equal(here[0], want[0])
    for a,b in zip(here, want, strict=True): assert (a-b).abs().max() <= 1e-6*b.abs().max()
    tables = [g for g in here if g.shape == (50, 8)]
    assert len(tables) == (make()[0].module.encoder.weight.requires_grad) and all(not g[1].any() and g[2:].any() for g in tables)

def train20(xla):
    "Losses of 20 steps and the weights after them"
    model,x = clas_model(),tokens(3, short=False)
    if xla: model,x = model.to(device()),x.to(device())
    opt,losses = torch.optim.SGD(model.parameters(), .1, momentum=.9),[]
    y = torch.arange(len(x), device=x.device)%2
    with HostDraws():
        for _ in range(20):
            losses.append(F.cross_entropy(model(x)[0], y))
            losses[-1].backward()
            opt.step()
            opt.zero_grad()
            if xla: sync()
    return [t.detach() for t in fetch([torch.stack(losses), *model.parameters()])]

def test_twenty_steps(monkeypatch):
    "Losses and weights are those of chunks that are embedded one by one, and the CPU's"
    cpu,here = train20(False),train20(True)
    with each_chunk(monkeypatch): before = train20(True)
    assert cpu[0][-1] < .9*cpu[0][0]
    for want in (cpu, before):
        for a,b in zip(here, want, strict=True): assert (a-b).abs().max() < 1e-4*b.abs().max()

def test_replayed_steps_of_several_lengths(monkeypatch):
    "A fit that is replayed, with dropout: losses are those of chunks that are embedded one by one"
    lengths = set()
    def losses():
        learn = clas_learner(dls=clas_dls(n=96, shortest=10, spread=4), config=dict(n_layers=1)).to_xla()
        manual_seed(1)
        fit(learn, 2, 1e-2)
        lengths.update(x.shape[1] for x,_ in learn.dls.train)
        return torch.stack([torch.as_tensor(l) for l in learn.recorder.losses])
    here = losses()
    with each_chunk(monkeypatch): want = losses()
    assert len(lengths) > 1 and len(here) > 15 and (here-want).abs().max() < 1e-4*want.max()

class Louder(EmbeddingDropout):
    def forward(self, words, scale=None): return 2*super().forward(words, scale)

class Own(EmbeddingDropout):
    def forward(self, words, scale=None): return self.emb(words)+1

def hook_words(m): m.encoder_dp.register_forward_pre_hook(lambda m, args: (args[0].flip(1),))
def hook_rows(m): m.encoder_dp.register_forward_hook(lambda m, args, out: out*2 + args[0][...,None])
def parametrize_rows(m): torch.nn.utils.parametrizations.spectral_norm(m.encoder)
def max_norm(m): m.encoder.max_norm = .1
def by_frequency(m): m.encoder.scale_grad_by_freq = True
def other_class(cls, m): m.encoder_dp = cls(m.encoder, .3)

@pytest.mark.parametrize('change', [hook_words, hook_rows, parametrize_rows, max_norm, by_frequency, partial(other_class, Louder),
    partial(other_class, Own)], ids=['pre hook', 'hook', 'parametrization', 'max_norm',
    'by frequency', 'calls the forward', 'another forward'])
def test_changed_embedding_is_heard(change, monkeypatch):
    "What hooks, subclasses and options of the embedding do is done to each chunk"
    def run(change=noop):
        model = clas_model(embed_p=0.)
        change(model[0].module)
        return fetch(on_xla(model, tokens(3)))
    here,plain = run(change),run()
    with each_chunk(monkeypatch): want = run(change)
    for a,b in zip(here, want, strict=True): assert (a-b).abs().max() <= 1e-6*b.abs().max()
    assert any(a.shape != b.shape or (a-b).abs().max() > 1e-4*b.abs().max() for a,b in zip(here, plain))
