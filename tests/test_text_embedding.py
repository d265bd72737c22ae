"A text's chunks are looked up in the embedding at once: the numbers of chunks that are embedded one by one"
from contextlib import contextmanager
from functools import lru_cache, partial
import re
import pytest, torch
from fastai.text.all import *
from fastai_xla.all import *
from fastai_xla.graphs import hlo_text
from fastai_xla.seeds import manual_seed
from fastai_xla.transfer import *
import fastai_xla.compat.text
from fastai_xla.parity.truth import HostDraws
from text_learners import *

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

def trained(xla):
    "Losses of ten steps and the weights after them"
    model,x = clas_model(n_layers=1),tokens(3, short=False)
    if xla: model,x = model.to(device()),x.to(device())
    opt,losses = torch.optim.SGD(model.parameters(), .03, momentum=.9),[]
    y = torch.arange(len(x), device=x.device)%2
    with HostDraws():
        for _ in range(10):
            losses.append(F.cross_entropy(model(x)[0], y))
            losses[-1].backward()
            opt.step()
            opt.zero_grad()
            if xla: sync()
    return [t.detach() for t in fetch([torch.stack(losses), *model.parameters()])]

def test_ten_steps(monkeypatch):
    "Losses and weights are those of chunks that are embedded one by one, and the CPU's"
    cpu,here = trained(False),trained(True)
    with each_chunk(monkeypatch): before = trained(True)
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

@lru_cache
def unchanged(): return fetch(on_xla(clas_model(embed_p=0.), tokens(3)))

@pytest.mark.parametrize('change', [hook_words, hook_rows, parametrize_rows, max_norm, by_frequency, partial(other_class, Louder),
    partial(other_class, Own)], ids=['pre hook', 'hook', 'parametrization', 'max_norm',
    'by frequency', 'calls the forward', 'another forward'])
def test_changed_embedding_is_heard(change, monkeypatch):
    "What hooks, subclasses and options of the embedding do is done to each chunk"
    def run():
        model = clas_model(embed_p=0.)
        change(model[0].module)
        return fetch(on_xla(model, tokens(3)))
    here,plain = run(),unchanged()
    with each_chunk(monkeypatch): want = run()
    for a,b in zip(here, want, strict=True): assert (a-b).abs().max() <= 1e-6*b.abs().max()
    assert any(a.shape != b.shape or (a-b).abs().max() > 1e-4*b.abs().max() for a,b in zip(here, plain))
