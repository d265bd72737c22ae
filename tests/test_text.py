"fastai.text on XLA: the contract for language models and classifiers, and the CPU's numbers"
import pytest, torch
from fastai.text.all import *
from fastai_xla.all import *
from fastai_xla.transfer import *
from fastai_xla.compat.text import text_lengths, _pad_chunk
from fastai_xla.parity.truth import HostDraws
from probe import *
from text_learners import *

def test_lm_contract():
    "One execution and nothing else per batch; the short batch at the end of the data is one graph more, once"
    learn = fit(lm_learner(config=dict(bidir=True), cbs=Probe()).to_xla(), 2, 1e-2)   # the other is a case of the coverage table
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
    learn = fit(clas_learner(dls=clas_dls(n=96, shortest=10, spread=5), config=dict(n_layers=1), cbs=Probe()).to_xla(), 2, 1e-2)
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

# lengths -> what `max_len` may be; where less would keep nothing, fastai itself has an error
of_lens = {(61, 45, 20, 3): (7, 16, 20, 24, 60), (64, 33, 32, 31): (8, 16, 20, 24, 60), (40, 40, 39, 1): (8, 16, 20, 24, 60),
           (17, 9, 8, 2): (1, 7, 16, 20, 24), (30, 29, 5): (7, 16, 20, 24, 60)}

@pytest.mark.parametrize('lens,max_len', [(l, m) for l,ms in of_lens.items() for m in ms])
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
    whole = -(-max(lens)//8)*8   # chunks
    for padded in {max(lens), whole, whole+24}:
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
