"locate_fault: nothing found where nothing is wrong; layer, operator, pass and backend named where something is"
import sys
from pathlib import Path
import pytest, torch
from fastai.vision.all import *
from fastai.text.all import TextLearner, LMLearner, text_classifier_learner, language_model_learner, TextDataLoaders, AWD_LSTM
from common import *
from planted import OtherEps, points, tanh_net
from fastai_xla.all import *
from fastai_xla.transfer import fetch
from fastai_xla.lowerings.all import without_lowerings
from fastai_xla.parity.locate import locate_fault
from fastai_xla.parity.models import compare_models
from fastai_xla.parity.truth import swap_op, plain
sys.path.insert(0, str(Path(__file__).parent.parent/'benchmarks'))
from locate import models, plant, candidates, locate_paths   # benchmarks/locate.py: the full matrix

@pytest.mark.parametrize('name', models)
def test_no_alarm(name):
    for seed in range(1):
        set_seed(seed+10, reproducible=True)
        model,batch,loss = models[name]()
        f = locate_fault(model, batch, loss)
        assert not f and f.n_calls > 10, f

# one for each model, either backend and either phase among them
faults = [('cpu', 'forward', 1e-4), ('cpu', 'backward', 1e-3), ('xla', 'backward', 1e-4), ('xla', 'forward', 1e-3)]

@pytest.mark.parametrize('name,backend,phase,eps', [(name, *faults[i%4]) for i,name in enumerate(models)])
def test_planted(name, backend, phase, eps):
    set_seed(5, reproducible=True)
    model,batch,loss = models[name]()
    paths = set(locate_paths(model, batch, loss))
    path,module = random.Random(name+backend+phase).choice([(n, m) for n,m in candidates(model) if n in paths])
    plant(module, backend, eps, phase)
    f = locate_fault(model, batch, loss)
    assert (f.path, f.phase, f.backend) == (path, phase, backend) and .5*eps < f.error < 2*eps, f
    assert str(f).startswith(f.operator) and path in str(f) and '<table' in f._repr_html_()

faulty_ops = {'aten.tanh_backward': ('1', 'backward', lambda g, y: g*(1-y*y)*1.001),
              'aten.gelu_backward': ('3', 'backward', lambda *args, **kw: plain(torch.ops.aten.gelu_backward.default)(*args, **kw)*1.001)}

@pytest.mark.parametrize('backend', ['cpu', 'xla'])
@pytest.mark.parametrize('op', faulty_ops)
def test_operator(op, backend):
    "A kernel that is wrong, on the CPU in every precision: named, and confirmed by its plain formula"
    path,phase,fn = faulty_ops[op]
    with swap_op(op, backend, fn):
        f = locate_fault(tanh_net(), points, F.cross_entropy)
        before,after = f.confirm()
        with f.swap_op(): assert not locate_fault(tanh_net(), points, F.cross_entropy)
    assert (f.path, f.operator, f.phase, f.backend) == (path, f'{op}.default', phase, backend)
    assert before > 9e-4 and after < 1e-6

def test_no_alarm_once_operators_are_put_back():
    for op,(_,_,fn) in faulty_ops.items():
        for backend in ('cpu', 'xla'):
            with swap_op(op, backend, fn), swap_op(op, backend): pass
    assert not locate_fault(tanh_net(), points, F.cross_entropy)

def test_module_without_an_operator():
    f = locate_fault(nn.Sequential(nn.Linear(6, 8), OtherEps(8), nn.Linear(8, 3)), points, F.cross_entropy)
    assert (f.path, f.phase, f.backend) == ('1', 'forward', 'xla') and f.operator.startswith('OtherEps')
    with pytest.raises(ValueError, match='look at the code of 1'): f.swap_op()

@pytest.mark.parametrize('device_type,blamed', [('xla', 'xla'), ('cpu', 'cpu')])
def test_code_for_one_device(device_type, blamed):
    "An additional operation on one device, in float64 too: the backend that does it is to blame, even where that is the CPU"
    net = tanh_net()
    net[1].forward = lambda x: x.tanh()*1.001 if x.device.type == device_type else x.tanh()
    f = locate_fault(net, points, F.cross_entropy)
    assert (f.path, f.phase, f.backend) == ('1', 'forward', blamed)

def test_residual_sum():
    "The code of a block, not of its layers; a hook; a custom function"
    class Block(nn.Module):
        def __init__(self): super().__init__(); self.lin,self.act = nn.Linear(6, 6),nn.ReLU(inplace=True)
        def forward(self, x):
            y = x + self.lin(x)
            return self.act(y*1.0001 if y.device.type == 'xla' else y)
    f = locate_fault(nn.Sequential(nn.Linear(6, 6), Block(), nn.Linear(6, 3)), points, F.cross_entropy)
    assert (f.path, f.phase, f.backend) == ('1', 'forward', 'xla')
    net = tanh_net()
    net[2].register_forward_hook(lambda m, i, o: o*1.0001 if o.device.type == 'xla' else o)
    f = locate_fault(net, points, F.cross_entropy)
    assert (f.path, f.phase, f.backend) == ('2', 'forward', 'xla')

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x*x
    @staticmethod
    def backward(ctx, g): return 2*g*ctx.saved_tensors[0]*(1.001 if g.device.type == 'xla' else 1)

def test_custom_function_and_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b,self.head = nn.Linear(6, 6),nn.Linear(6, 6),nn.Linear(6, 3)
            self.b.weight = self.a.weight
        def forward(self, x):
            h,(y,) = self.a(x),(self.b(Square.apply(x)),)
            return self.head(F.dropout(h*Square.apply(y), .2, self.training))
    model = Tied()
    before = {k: v.clone() for k,v in model.state_dict().items()}
    f = locate_fault(model, points, F.cross_entropy)
    assert f.phase == 'backward' and f.backend == 'xla' and f.path == '(the model itself)'
    assert (all(torch.equal(v, before[k]) for k,v in model.state_dict().items())
            and all(p.grad is None for p in model.parameters()) and model.b.weight is model.a.weight)

def test_historic_crash():
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    with without_lowerings('batch_norm'): f = locate_fault(net, points, F.cross_entropy)
    assert ((f.path, f.operator, f.phase, f.backend) == ('1', 'aten.native_batch_norm_backward.default', 'backward', 'xla')
            and 'offset factor is 0' in str(f))
    assert not locate_fault(net, points, F.cross_entropy)
    with without_lowerings('batch_norm'): f = locate_fault(net.train(), points, F.cross_entropy)
    assert (f.path, f.table.tensor.iloc[0]) == ('1', 'running_var')   # torch_xla's biased variance

def test_gradient_that_is_zero():
    "A bias before a BatchNorm, and a residual branch that begins at zero"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
                        ResBlock(1, 8, 8), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(8, 3))
    assert not locate_fault(net, (torch.randn(8, 3, 16, 16), torch.arange(8) % 3), F.cross_entropy)

@pytest.mark.parametrize('xla', [False, True])
def test_learner(xla):
    learn = image_learner().remove_cb(ProgressCallback)
    if xla: learn.to_xla()
    with learn.no_logging(): learn.fit(1)
    before = deepcopy(fetch({k: v.clone() for k,v in learn.model.state_dict().items()}))
    assert not locate_fault(learn)
    learn.model[1][1].forward = lambda x: F.adaptive_avg_pool2d(x, 1)*(1.001 if x.dtype == torch.float32 and x.device.type == 'xla' else 1)
    f = locate_fault(learn)
    assert (f.path, f.backend, f.phase) == ('1.1', 'xla', 'forward')
    assert all(torch.equal(v, before[k]) for k,v in fetch(learn.model.state_dict()).items())
    with learn.no_logging(): learn.fit(1)

def test_language_model():
    df = pd.DataFrame(dict(text=[' '.join(random.Random(i).choices('the cat sat on a mat and ate rice'.split(), k=30)) for i in range(40)]))
    dls = TextDataLoaders.from_df(df, text_col='text', is_lm=True, bs=4, seq_len=8, num_workers=0)
    learn = language_model_learner(dls, AWD_LSTM, pretrained=False,
                                   config=dict(emb_sz=12, n_hid=16, n_layers=2, pad_token=1, bidir=False, output_p=.1,
                                               hidden_p=.1, input_p=.1, embed_p=.1, weight_p=.1, tie_weights=True, out_bias=True))
    assert not locate_fault(learn)
    plant(learn.model[0].rnns[1].module, 'xla', 1e-3, 'backward')
    f = locate_fault(learn)
    assert (f.path, f.phase, f.backend) == ('0.rnns.1.module', 'backward', 'xla')

def test_two_precisions():
    net = tanh_net()
    assert not locate_fault(net, points, F.cross_entropy, backends=('cpu', 'cpu/bfloat16'))
    net[1].forward = lambda x: x.tanh()*(1.2 if x.dtype == torch.bfloat16 else 1)
    f = locate_fault(net, points, F.cross_entropy, backends=('cpu', 'cpu/bfloat16'))
    assert (f.path, f.backend) == ('1', 'cpu/bfloat16')
