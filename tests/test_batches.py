"Batches of other kinds than tensors in a plain tuple"
import pytest
from fastai.vision.all import *
from fastai_xla.all import *

class Pair(fastuple): "Two pictures and whether they show the same, as an item of somebody's own class"

class TwoInputs(Module):
    def __init__(self): self.body,self.head = nn.Linear(6, 4),nn.Linear(8, 2)
    def forward(self, a, b): return self.head(torch.cat([self.body(a), self.body(b)], 1))

def ran(cls, xla):
    set_seed(2)
    a,b,y = torch.randn(96, 6),torch.randn(96, 6),torch.randint(2, (96,))
    items = [cls((a[i], b[i], y[i])) for i in range(96)]
    dls = DataLoaders(DataLoader(items[:64], bs=8), DataLoader(items[64:], bs=8))
    dls.n_inp = dls.train.n_inp = dls.valid.n_inp = 2
    learn = Learner(dls, TwoInputs(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    if xla: learn.to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
    return learn

@pytest.mark.parametrize('cls', [tuple, Pair])
def test_batch_of_ones_own_tuple_class_is_replayed(cls):
    cpu,xla = ran(cls, False),ran(cls, True)
    torch.testing.assert_close(tensor(xla.recorder.losses), tensor(cpu.recorder.losses), rtol=1e-4, atol=1e-5)
    for p,q in zip(cpu.model.parameters(), xla.model.parameters()): torch.testing.assert_close(q.cpu(), p, rtol=1e-3, atol=1e-4)
    steady = xla.xla_report().per_batch('training')
    assert (steady['compiles'],steady['to host'],steady['fallbacks']) == (0, 0, 0), steady
    assert steady['executions'] <= 1.2, steady   # an audit now and then
    assert not xla.xla_opt.replay.fit.plain
