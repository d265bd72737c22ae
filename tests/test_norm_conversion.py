"Norm layers converted to each other, checkpoints of others, and fastai's layers"
import pytest, torch
from torch import nn
import torch.nn.functional as F
from fastai.vision.all import *
from fastai.torch_core import norm_bias_params
from fastai_xla.all import *
from fastai_xla.transfer import *
from common import *
from norms import *

# Checkpoints of others

def test_lesson10_checkpoint():
    old = nn.Sequential(nn.Conv2d(1, 4, 3), Lesson10(4))
    for i in range(10): old(torch.randn(8, 1, 6, 6)*2+1)
    with torch.no_grad(): old[1].mults.mul_(1.5), old[1].adds.add_(.3)
    new = nn.Sequential(nn.Conv2d(1, 4, 3), RunningBatchNorm2d(4))
    new.load_state_dict(old.state_dict())
    x = torch.randn(8, 1, 6, 6)
    close(new.eval()(x), old.eval()(x).detach())
    thread = Thread(4)
    untrained = RunningBatchNorm2d(4)
    untrained.load_state_dict(thread.state_dict())
    test_eq((untrained.count.item(), untrained.running_var.tolist()), (0, [1]*4))

def test_batchnorm_checkpoint():
    bn,new = nn.BatchNorm2d(4),RunningBatchNorm2d(4)
    new.load_state_dict(bn.state_dict())
    test_eq(new.count.item(), 0)
    bn(torch.randn(8, 4, 3, 3)+2)
    new.load_state_dict(bn.state_dict())
    x = torch.randn(8, 4, 3, 3)
    close(new.eval()(x), bn.eval()(x).detach())
    with pytest.raises(RuntimeError, match='Missing key'): new.load_state_dict({'weight': torch.ones(4)})

# Conversion

def trained(norm, shape=(8, 6, 4, 4)):
    m = nn.Sequential(nn.Conv2d(6, 6, 1) if len(shape) == 4 else nn.Identity(), norm)
    with torch.no_grad():
        norm.weight.uniform_(.5, 1.5), norm.bias.normal_()
    for i in range(10): m(torch.randn(shape)*2+1)
    return m

@pytest.mark.parametrize('route', [('running', 'batch'), ('frozen', 'batch'), ('running', 'frozen', 'running', 'batch')])
def test_there_and_back(route):
    m,x = trained(nn.BatchNorm2d(6, eps=1e-3, momentum=.2)).eval(),torch.randn(8, 6, 4, 4)
    before = m(x).detach()
    for to in route:
        convert_norm(m, to, verbose=False)
        close(m(x), before)
        assert not m[1].training
    test_eq(type(m[1]), nn.BatchNorm2d)
    test_eq((m[1].eps, m[1].affine, m[1].num_batches_tracked.item() > 0), (1e-3, True, True))
    if 'frozen' not in route: test_eq(m[1].momentum, .2)

def test_parameters_stay_the_same():
    m = trained(nn.BatchNorm2d(6))
    m[1].weight.requires_grad_(False)
    w,b = m[1].weight,m[1].bias
    for to in ('running', 'group', 'running', 'batch'):
        convert_norm(m, to, verbose=False)
        assert m[1].weight is w and m[1].bias is b and not w.requires_grad and b.requires_grad and m[1].training
    m(torch.randn(4, 6, 4, 4)).sum().backward()
    assert b.grad is not None

def test_group():
    m,x = convert_norm(trained(nn.BatchNorm2d(6)), 'group', verbose=False),torch.randn(4, 6, 4, 4)
    test_eq((m[1].num_groups, m[1].affine), (3, True))
    close(m(x), F.group_norm(m[0](x), 3, m[1].weight, m[1].bias).detach())
    for nf,g in ((64, 32), (32, 16), (1, 1), (7, 1), (96, 32), (48, 24)):
        test_eq(convert_norm(nn.BatchNorm1d(nf), 'group', verbose=False).num_groups, g)
    test_eq(convert_norm(nn.BatchNorm2d(64), 'group', groups=8, verbose=False).num_groups, 8)

@pytest.mark.parametrize('to', ['batch', 'running', 'group', 'frozen'])
def test_the_root_and_its_kind(to, capsys):
    for d,cls in ((1, nn.BatchNorm1d), (3, nn.BatchNorm3d)):
        new = convert_norm(cls(4).to(device()).double().eval(), to)
        test_eq(capsys.readouterr().out.count('\n'), 1)
        assert all(t.device.type == 'xla' for t in (*new.parameters(), *new.buffers())) and not new.training
        test_eq({p.dtype for p in (new.weight, new.bias)}, {torch.float64})
        if to == 'running': assert isinstance(new, cls)
        if to == 'frozen': test_eq(type(convert_norm(new, 'batch', verbose=False)), cls)

def test_shared_layer_stays_shared():
    bn = nn.BatchNorm2d(6)
    m = nn.ModuleDict(dict(a=bn, b=nn.Sequential(bn)))
    convert_norm(m, 'running', verbose=False)
    assert m['a'] is m['b'][0] and isinstance(m['a'], RunningBatchNorm2d)

def test_report(capsys):
    m = nn.Sequential(nn.BatchNorm2d(6), nn.GroupNorm(2, 6), nn.LayerNorm(3),
                      nn.InstanceNorm2d(6), nn.BatchNorm2d(6, track_running_stats=False))
    convert_norm(m, 'frozen')
    lines = capsys.readouterr().out.splitlines()
    test_eq([('left' in l) for l in lines], [False, True, True, True, True])
    convert_norm(m, 'running', update_every=4)
    test_eq([type(l).__name__ for l in m], ['RunningBatchNorm2d', 'RunningBatchNorm', 'LayerNorm', 'InstanceNorm2d', 'RunningBatchNorm2d'])
    test_eq(m[0].update_every, 4)
    assert m(torch.randn(4, 6, 3, 3)).isfinite().all()
    convert_norm(m, 'running')
    assert 'already' in capsys.readouterr().out

def test_never_silent():
    for model,to,msg in ((nn.Linear(2, 2), 'running', 'no norm layer'), (nn.LayerNorm(2), 'batch', 'LayerNorm'),
                         (nn.GroupNorm(1, 2), 'frozen', 'no norm layer'), (nn.BatchNorm1d(2), 'Running', 'no such kind')):
        with pytest.raises(ValueError, match=msg): convert_norm(model, to)
    with pytest.raises(TypeError, match='update_every'): convert_norm(nn.BatchNorm1d(2), 'group', update_every=2)
    with pytest.raises(ValueError, match='update_every=0'): RunningBatchNorm(2, update_every=0)
    with pytest.raises(ValueError, match='expected 4D'): RunningBatchNorm2d(2)(torch.randn(2, 2))
    with pytest.raises(ValueError, match=r'x\[None\]'): RunningBatchNorm(2)(torch.randn(2))

@pytest.mark.parametrize('dev', ['cpu', 'xla'])
def test_freeze_bn(dev):
    m,x = trained(nn.BatchNorm2d(6)),torch.randn(8, 6, 4, 4)
    m.eval()
    expected = torch.autograd.grad(m(xi := x.clone().requires_grad_()).pow(3).sum(), [xi, m[0].weight])
    freeze_bn(m, verbose=False).train().to(device() if dev == 'xla' else dev)
    before = fetch({k: v.clone() for k,v in m[1].state_dict().items()})
    xi = x.to(m[0].weight.device).requires_grad_()
    for a,e in zip(torch.autograd.grad(m(xi).pow(3).sum(), [xi, m[0].weight]), expected): close(a, e)
    test_eq(len(list(m[1].parameters())), 0)
    for k,v in fetch(m[1].state_dict()).items(): assert torch.equal(v, before[k])

# fastai

def test_norm_type():
    for d in (1, 2, 3):
        test_eq(type(ConvLayer(2, 4, ndim=d, norm_type=NormType.Running)[1]),
                [RunningBatchNorm1d, RunningBatchNorm2d, RunningBatchNorm3d][d-1])
    torch.manual_seed(0); a = ConvLayer(2, 4, norm_type=NormType.RunningZero, bn_1st=False)
    torch.manual_seed(0); b = ConvLayer(2, 4, norm_type=NormType.BatchZero, bn_1st=False)
    assert torch.equal(a[0].weight, b[0].weight) and a[0].bias is None and isinstance(a[2], RunningBatchNorm2d) and not a[2].weight.any()
    test_eq([NormType.Running, NormType['RunningZero'].name, NormType(7)], [NormType.Running, 'RunningZero', NormType.Running])
    test_eq(pickle.loads(pickle.dumps(NormType.Running)), NormType.Running)
    m = xresnet18(n_out=3)
    convert_norm(m, 'running', verbose=False)
    test_eq({type(l) for l in m.modules() if isinstance(l, nn.BatchNorm2d)}, {RunningBatchNorm2d})

@pytest.mark.parametrize('norm_type', [NormType.Batch, NormType.BatchZero, NormType.Weight, NormType.Instance, NormType.InstanceZero, None])
def test_other_norm_types_are_untouched(norm_type):
    for make in (lambda cls, init: init(cls, 2, 4, norm_type=norm_type), lambda cls, init: init(cls, 2, 4, 3, 1, None, None, 2, norm_type)):
        a,b = ConvLayer.__new__(ConvLayer),ConvLayer.__new__(ConvLayer)
        torch.manual_seed(0); make(a, ConvLayer.__init__)
        torch.manual_seed(0); make(b, ConvLayer.__init__.__wrapped__)
        test_eq(str(a), str(b))
        for (k,p),(l,q) in zip(a.state_dict().items(), b.state_dict().items()): assert k == l and torch.equal(p, q)
    test_eq(inspect.signature(ConvLayer.__init__), inspect.signature(ConvLayer.__init__.__wrapped__))

def test_fastai_knows_it_as_a_norm():
    "No weight decay on it, trainable in a frozen body, frozen by `BnFreeze`"
    for l in (RunningBatchNorm(4), RunningBatchNorm2d(4)):
        test_eq(len(norm_bias_params(nn.Sequential(nn.Conv2d(1, 4, 3), l), with_bias=False)), 2)
    learn = image_learner()
    convert_norm(learn.model, 'running', verbose=False)
    learn.freeze()
    test_eq([p.requires_grad for p in learn.model[0].parameters()], [False, True, True])
    m = nn.Sequential(RunningBatchNorm2d(4))
    m[0].requires_grad_(False)
    set_bn_eval(m)
    assert not m[0].training
