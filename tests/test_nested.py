"`nn.TransformerEncoder` with padding: validation has the CPU's numbers, in one execution per batch; other devices' calls are as without"
import pytest, torch.fx, warnings
from fastai.vision.all import *
from fastai_xla.all import *
from on_both import compare, fits, told

class Reader(Module):
    "The mean over all places, those of padding too"
    def __init__(self, norm=False):
        self.emb,self.out = nn.Embedding(20, 8, padding_idx=0),nn.Linear(8, 2)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(8) if norm else None)
    def forward(self, x): return self.out(self.enc(self.emb(x), src_key_padding_mask=x == 0).mean(1))

def reader(first=False, **kwargs):
    "Rows of other lengths, padded at the end, or `first`"
    t = torch.randint(1, 20, (48, 6), generator=torch.Generator().manual_seed(0))
    pad = torch.arange(6) >= 1 + torch.arange(48)[:,None]%6
    x,y = t.masked_fill(pad.flip(1) if first else pad, 0),t[:,0]%2
    dls = DataLoaders(*(DataLoader(list(zip(x[s], y[s])), bs=8, num_workers=0) for s in (slice(32), slice(32, 48))))
    return Learner(dls, Reader(**kwargs), loss_func=CrossEntropyLossFlat(), metrics=accuracy)

@pytest.mark.parametrize('kwargs', [{}, dict(first=True), dict(norm=True)], ids=['end', 'first', 'norm'])
def test_validation_is_that_of_the_cpu(kwargs):
    def story(learn): return fits(learn),learn.get_preds()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')   # nested tensors are a prototype
        learn = compare(lambda: reader(**kwargs), story, replays=('auto',) if kwargs else ('auto', False))
    report = learn.xla_report()
    assert not report.plain and not report.beside

def test_without_it_the_numbers_are_others():
    from fastai_xla.lowerings.all import without_lowerings
    _,there = told(reader, fits)
    with without_lowerings('nested'): _,here = told(reader, fits, True)
    assert abs(there['.values.0.1'] - here['.values.0.1']) > 1e-4

def test_on_the_cpu_calls_are_seen_as_they_are():
    "By a tracer that watches `nn.Module.__call__`, by TorchScript, and by a subclass that takes other arguments"
    class Own(nn.TransformerEncoder):
        def forward(self, x, lengths): return super().forward(x)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True)
    enc,x = nn.TransformerEncoder(layer, 1).eval(),torch.randn(2, 3, 8)
    assert Own(layer, 1)(x, lengths=None).shape == x.shape
    graph = torch.fx.symbolic_trace(nn.Sequential(enc)).graph
    assert [n.target for n in graph.nodes if n.op == 'call_module'] == ['0']
    with torch.no_grad(): torch.testing.assert_close(torch.jit.script(enc)(x), enc(x))
