"State that a model keeps in its attributes, and data that is on the device already: on XLA as on the CPU"
import warnings
import own_process, pytest, torch
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.runtime import device, is_xla
from torch.utils.data import TensorDataset
from common import *
from on_both import *

# Hidden state

def sequences(odd=0):
    "Batches of 8 sequences; the last one of each pass has `odd`, where that is not 0"
    g = torch.Generator().manual_seed(0)
    def items(n):
        x = torch.randint(10, (n+odd, 5), generator=g)
        return list(zip(x, (x+1)%10))
    return DataLoaders.from_dsets(items(4*8), items(2*8), bs=8, shuffle=False, drop_last=not odd, num_workers=0)

class Recurrent(nn.Module):
    "A state that is 0 first, and then a tensor"
    def __init__(self, h=0):
        super().__init__()
        self.emb,self.hidden,self.out,self.h = nn.Embedding(10, 8),nn.Linear(8, 8),nn.Linear(8, 10),h
    def forward(self, x):
        outs = []
        for i in range(x.shape[1]):
            self.h = F.relu(self.hidden(self.h + self.emb(x[:,i])))
            outs.append(self.out(self.h))
        self.h = self.h.detach()
        return torch.stack(outs, dim=1)

class Resets(Recurrent):
    def reset(self): self.h = 0

class Sized(Recurrent):
    "A state of each batch's size"
    def reset(self): self.h = None
    def forward(self, x):
        if self.h is None or len(self.h) != len(x): self.h = torch.zeros(len(x), 8, device=x.device)
        return super().forward(x)

class Layers(nn.Module):
    "A list of tensors, made on the CPU at each reset"
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.out = nn.Embedding(10, 8),nn.LSTM(8, 8, 2, batch_first=True),nn.Linear(8, 10)
        self.reset()
    def forward(self, x):
        res,h = self.rnn(self.emb(x), self.h)
        self.h = [o.detach() for o in h]
        return self.out(res)
    def reset(self): self.h = [torch.zeros(2, 8, 8) for _ in range(2)]

def seq_loss(pred, targ): return F.cross_entropy(pred.flatten(0, 1), targ.flatten())
def seq_learner(model, cbs=ModelResetter, **kwargs): return Learner(sequences(**kwargs), model(), loss_func=seq_loss, cbs=cbs)

def fits_and_validates(learn):
    fits(learn)
    metrics,preds = learn.validate(),learn.get_preds()[0]
    fits(learn, 1)
    return metrics,preds,learn.model.h

@pytest.mark.parametrize('model,odd', [(Resets, 0), (Sized, 3), (Layers, 0)])
def test_hidden_state_in_an_attribute(model, odd):
    "It is 0 or `None` after a reset and a tensor later, or comes from the CPU, or changes its size with the batch"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn = compare(lambda: seq_learner(model, odd=odd), fits_and_validates)
    assert sum(plain(learn).values()) <= 2   # the first batch after a reset, in training and in validation

def test_hidden_state_reset_within_an_epoch():
    "The recording of a tensor is not run with a number"
    class Forgets(Callback):
        def before_batch(self):
            if self.training and self.iter % 2: self.model.h = 0
    compare(lambda: seq_learner(Recurrent, cbs=Forgets()), fits)

class Nested(Recurrent):
    "A state in a list of tuples, as that of AWD_LSTM, in float32 after a reset and in bfloat16 after a batch"
    def __init__(self):
        super().__init__()
        self.reset()
    def reset(self): self.state = [(torch.zeros(8, 8, device=self.out.weight.device),)]
    def forward(self, x):
        self.h = self.state[0][0]
        res = super().forward(x)
        self.state,self.h = [(self.h,)],0
        return res

def test_hidden_state_changes_its_dtype_in_mixed_precision():
    """A recording for float32 is not run with bfloat16

    XLA computes otherwise than the CPU in bfloat16, so steps are compared with retraced ones"""
    def story(learn):
        fits(learn)
        return learn.validate(),learn.model.state
    make = lambda: seq_learner(Nested).to_bf16()
    (learn,replayed),(_,retraced) = told(make, story, True),told(make, story, True, replay=False)
    assert all(agree(retraced[k], replayed[k], 1e-6) for k in {**retraced, **replayed})
    assert not plain(learn)

def test_hidden_state_on_the_cpu_is_moved_and_told_once():
    learn = seq_learner(Layers)
    with pytest.warns(UserWarning, match=r"The model keeps h on the CPU.*register_buffer\('h'") as told:
        learn.to_xla()
        with learn.no_logging(), learn.no_bar(): fits(learn)
    assert len([w for w in told if 'keeps h on the CPU' in str(w.message)]) == 1
    assert all(is_xla(t) for t in learn.model.h)
    learn.detach_xla()
    assert not any(is_xla(t) for t in learn.model.h)
    with learn.no_logging(), learn.no_bar(): fits(learn, 1)

def test_error_names_a_tensor_left_on_the_cpu():
    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn,self.start = nn.RNN(64, 4, batch_first=True),torch.zeros(1, 8, 4)
        def forward(self, x): return self.rnn(x.flatten(1)[:,None], self.start)[0][:,0]
    learn = Learner(image_dls(n=2*8, n_valid=8, bs=8), Shifts(), loss_func=CrossEntropyLossFlat()).to_xla()
    said = r"On the CPU are still: model.start.*register_buffer\('start'"
    with learn.no_logging(), learn.no_bar(), pytest.raises(RuntimeError, match=said): learn.fit(1)

weights = torch.ones(4)
class Weighed:
    def __init__(self): self.w = weights.clone()
    def __call__(self, pred, targ): return F.cross_entropy(pred, targ, weight=self.w)
def by_name(pred, targ): return F.cross_entropy(pred, targ, weight=weights)
def by_default(pred, targ, by=weights): return F.cross_entropy(pred, targ, weight=by)
losses_on_host = {'loss_func.weight': lambda: partial(F.cross_entropy, weight=weights), 'loss_func.w': Weighed,
                  'weights': lambda: by_name, 'loss_func.by': lambda: by_default}

@pytest.mark.parametrize('name', losses_on_host)
def test_error_names_a_tensor_of_a_loss(name):
    "What is no attribute of a module cannot be a buffer"
    learn = learner(loss_func=losses_on_host[name]()).to_xla()
    said = f'On the CPU are still: {name}.*to.x.device'
    with learn.no_logging(), learn.no_bar(), pytest.raises(RuntimeError, match=said) as e: learn.fit(1)
    assert 'register_buffer' not in str(e.value)

# Data that is on the device already

def table(device, n=6*8):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 64, generator=g).to(device),torch.randint(4, (n,), generator=g).to(device)

def table_dls(kind, device, **kwargs):
    x,y = table(device)
    if kind == 'rows': parts = [TensorDataset(x[s], y[s]) for s in (slice(32), slice(32, None))]
    elif kind == 'items': parts = [[(x[i], y[i]) for i in r] for r in (range(32), range(32, 48))]
    else: parts = [[(dict(x=x[i]), y[i]) for i in r] for r in (range(32), range(32, 48))]
    return DataLoaders.from_dsets(*parts, bs=8, num_workers=0, shuffle=False, **kwargs)

class OfDict(nn.Module):
    def __init__(self): 
        super().__init__()
        self.net = mlp()
    def forward(self, x): return self.net(x['x'] if isinstance(x, dict) else x)

@pytest.mark.parametrize('kind,places', [('rows', ['xla']), ('items', ['xla']), ('dicts', ['cpu', 'xla'])])
def test_data_on_the_device(kind, places):
    "And dicts that are not there yet"
    def make(at): return Learner(table_dls(kind, at), OfDict(), loss_func=F.cross_entropy, metrics=accuracy)
    _,there = told(lambda: make('cpu'), fits)
    for where in places:
        _,here = told(lambda: make(device() if where == 'xla' else 'cpu'), fits, True)
        assert there.keys() == here.keys() and all(agree(there[k], here[k], 1e-4) for k in there)

workers = '''
import signal, warnings
signal.alarm(300)   # whoever waits for ever is ended
from fastai.vision.all import *
from fastai_xla.all import *
from torch.utils.data import TensorDataset
x,y = torch.randn(16, 3).to(device()),torch.arange(16).to(device())
for where in (device(), None):
    dl = DataLoader(TensorDataset(x, y), bs=4, num_workers=2, device=where)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        n = len(list(dl))
    print(n, 'are on an XLA device, which a worker process cannot reach' in str(told[0].message))
'''

def test_items_on_the_device_are_not_read_by_workers(tmp_path):
    "They would wait for ever"
    res = own_process.run(['-c', workers], tmp_path)
    assert res.stdout.split() == ['4', 'True']*2, res.stderr
