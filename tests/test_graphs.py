"""A step seen from the inside: counts against independent ones, pictures and files, and nothing of the learner changed

    make test ARGS='tests/test_graphs.py'"""
import random, sys
import numpy as np, pytest, torch
import torch.nn.functional as F
import xml.etree.ElementTree as ET
from torch.utils.flop_counter import FlopCounterMode
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.explain import draw_graph, explain_step
from fastai_xla.hlo import Hlo, Shape, costs, read_graph
from fastai_xla.diagram import Graph, diff_graphs
from fastai_xla.graphs import graph_text, hlo_text, rng_state
from fastai_xla.transfer import send
from common import *

dev = device()

def plain_net():
    return nn.Sequential(nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU()), nn.Conv2d(6, 8, 3, stride=1), nn.Flatten(), nn.Linear(8*4*4, 4))

def quiet(learn):
    learn.remove_cb(ProgressCallback)
    return learn.to_xla()

def fc_flops(model, x, y, loss):
    with FlopCounterMode(display=False) as c: loss(model(x), y).backward()
    return c.get_total_flops()

def test_flops_of_step():
    "Convolutions and matrix products of a whole step, against PyTorch's own counter on the CPU"
    want = fc_flops(plain_net(), torch.randn(16, 1, 8, 8), torch.randint(4, (16,)), F.cross_entropy)
    learn = quiet(Learner(image_dls(), plain_net(), loss_func=CrossEntropyLossFlat(), splitter=params_of))
    by = costs(explain_step(learn).hlo, 'opcode').flops
    assert by['convolution'] + by['dot'] == want

@pytest.mark.parametrize('kw', [dict(), dict(padding=1), dict(stride=2, padding=2), dict(dilation=2, padding=1),
                                dict(groups=2), dict(stride=3, groups=4, padding=1)], ids=str)
def test_flops_of_convolution(kw):
    "Against ones convolved with ones, which count the products that are made, forward and in both gradients"
    x,w = torch.ones(2, 4, 11, 9),torch.ones(8, 4//kw.get('groups', 1), 3, 2)
    want = 2*int(F.conv2d(x, w, **kw).sum())
    xd,wd = (t.requires_grad_() for t in send([x, w], dev))
    y = F.conv2d(xd, wd, **kw)
    for t in (y, *torch.autograd.grad(y.sum(), (xd, wd))): assert costs(Hlo(hlo_text([t])), 'opcode').flops['convolution'] == want

def test_flops_of_products():
    a,b,c = send([torch.randn(3, 5, 7), torch.randn(3, 7, 2), torch.randn(2, 6)], dev)
    assert costs(Hlo(hlo_text([a @ b])), 'opcode').flops['dot'] == 2*3*5*7*2
    assert costs(Hlo(hlo_text([a @ b @ c])), 'opcode').flops['dot'] == 2*3*5*7*2 + 2*3*5*2*6
    assert costs(Hlo(hlo_text([a.exp()])), 'opcode').flops['exponential'] == a.numel()
    assert costs(Hlo(hlo_text([a.sum()])), 'opcode').flops['reduce'] == a.numel()

def test_parse():
    "A module written by hand: tuples, layouts, nested braces, a loop of five rounds"
    h = Hlo("""HloModule m, entry_computation_layout={(f32[2,3]{1,0})->(f32[2,3]{1,0}, s32[])}

%body.1 (p.1: (f32[2,3], s32[])) -> (f32[2,3], s32[]) {
  %p.1 = (f32[2,3]{1,0}, s32[]) parameter(0)
  %g.1 = f32[2,3]{1,0} get-tuple-element((f32[2,3]{1,0}, s32[]) %p.1), index=0
  %a.1 = f32[2,3]{1,0} add(f32[2,3]{1,0} %g.1, f32[2,3]{1,0} %g.1)
  %g.2 = s32[] get-tuple-element((f32[2,3]{1,0}, s32[]) %p.1), index=1
  ROOT %t.1 = (f32[2,3]{1,0}, s32[]) tuple(f32[2,3]{1,0} %a.1, s32[] %g.2)
}

ENTRY %main (p0: f32[2,3]) -> (f32[2,3], s32[]) {
  %p0 = f32[2,3]{1,0} parameter(0), metadata={op_type="xla__device_data" op_name="x"}
  %c = s32[] constant(7)
  %k = bf16[4]{0} constant({1, 2, 3, 4})
  %dead = f32[2,3]{1,0} sine(f32[2,3]{1,0} %p0)
  %t = (f32[2,3]{1,0}, s32[]) tuple(f32[2,3]{1,0} %p0, s32[] %c)
  ROOT %w = (f32[2,3]{1,0}, s32[]) while((f32[2,3]{1,0}, s32[]) %t), \
condition=%cond.1, body=%body.1, metadata={op_type="xla__while"}, backend_config={"known_trip_count":{"n":"5"}}
}
""")
    assert h.inputs[0].shapes == [Shape('f32', (2, 3))] and h.outputs == [Shape('f32', (2, 3)), Shape('s32', ())]
    assert [i.name for i in h.live] == ['p0', 'c', 't', 'w']          # what nothing uses is not in the program
    df = costs(h)
    assert df.flops.to_dict() == {'xla::while': 5*6, 'constant': 0} and df.bytes['xla::while'] == 28

def test_graph_text():
    "Every operator, its edges and shapes"
    x,w = send([torch.randn(4, 8), torch.randn(8, 3)], dev)
    y = (x @ w).relu()
    nodes = {n.op: n for n in read_graph(graph_text([y, y.sum()]))}
    assert (nodes['aten::relu'].ins == [nodes['aten::mm'].id] and nodes['aten::mm'].shapes == [Shape('f32', (4, 3))]
            and nodes['aten::relu'].root and nodes['aten::sum'].root and not nodes['aten::mm'].root)

def test_step_counts():
    "Inputs and outputs against what the learner holds: three parameters' worth of state for Adam, and a batch"
    # a size of its own: no test before it has compiled the program
    learn = quiet(Learner(image_dls(size=7), nn.Sequential(nn.Flatten(), nn.Linear(49, 4)),
                          loss_func=CrossEntropyLossFlat(), splitter=params_of, train_bn=False))
    s = explain_step(learn)
    shapes = lambda ls: [i for i in ls if i.dims]
    ins,outs = shapes([i.shapes[0] for i in s.hlo.inputs]),shapes(s.hlo.outputs)
    weight,bias = Shape('f32', (4, 49)),Shape('f32', (4,))
    assert sorted(map(str, ins)) == sorted(map(str, [weight, bias]*3 + [Shape('f32', (16, 1, 7, 7)), Shape('s64', (16,))]))
    assert [outs.count(weight), outs.count(bias)] == [3, 3]
    assert s.programs.loc['step', 'inputs'] == len(s.hlo.inputs) and s.flops >= 2*2*16*49*4 and s.compile_s > 0 and not len(s.causes)

def test_cut_is_told():
    learn = quiet(image_learner(cbs=Callback(after_pred=lambda self: self.pred.detach().sum().item())))
    s = explain_step(learn)
    assert list(s.programs.index) == ['step', 'cut 1'] and s.programs.loc['cut 1', 'outputs'] == 1 and set(s.causes.cause) == {'transfer'}

def state(learn):
    ts = [t.detach().cpu() for t in learn.model.state_dict().values()]
    if learn.opt is None: return ts
    return (ts + [v.cpu() if isinstance(v, torch.Tensor) else v for s in learn.opt.state.values() for v in s.values()]
            + [dict(h) for h in learn.opt.hypers])

def same(a, b): return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

looks = dict(explain=explain_step, lowering=lambda l: l.show_lowering_ops(), draw=draw_graph, causes=lambda l: l.xla_report(causes=True))

@pytest.mark.parametrize('opt', [Adam, ranger], ids=['adam', 'ranger'])
def test_nothing_changed(opt):
    set_seed(0)
    learn = quiet(image_learner(opt_func=opt, cbs=[SaveModelCallback(), CSVLogger()]))
    with tempfile.TemporaryDirectory() as d, learn.no_logging():
        learn.path = Path(d)
        learn.fit(1, 1e-2)
        files = {f: f.read_bytes() for f in Path(d).rglob('*') if f.is_file()}
        before,values,cbs,log = state(learn),list(learn.recorder.values),list(learn.cbs),learn.xla_opt.log
        rngs = rng_state(),torch.get_rng_state(),np.random.get_state()[1].tolist(),random.getstate()
        attrs = set(vars(learn))
        for name,look in looks.items():
            look(learn)
            assert all(map(same, before, state(learn))), name
            assert ((rng_state(),np.random.get_state()[1].tolist(),random.getstate()) == (rngs[0], rngs[2], rngs[3])
                    and torch.equal(torch.get_rng_state(), rngs[1])), name
            assert list(learn.recorder.values) == values and list(learn.cbs) == cbs, name
            assert learn.xla_opt.log is log and set(vars(learn)) == attrs, name
            assert {f: f.read_bytes() for f in Path(d).rglob('*') if f.is_file()} == files, name

@pytest.mark.parametrize('replay', [False, 'auto'])
def test_same_afterwards(replay):
    "A second fit goes on as if nobody had looked, and compiles nothing for having been looked at"
    def run(look):
        set_seed(0)
        learn = image_learner().to_xla(replay=replay)
        learn.remove_cb(ProgressCallback)
        manual_seed(0)
        with learn.no_logging():
            learn.fit(1, 1e-2)
            if look: [f(learn) for f in looks.values()]
            with count_xla() as c: learn.fit(1, 1e-2)
        return state(learn),learn.recorder.losses,c.compiles
    (a,la,na),(b,lb,nb) = run(False),run(True)
    assert all(map(same, a, b)) and la == lb and nb <= na

def test_before_first_fit():
    "A learner that has not been fitted has no optimizer before and none after"
    learn = quiet(image_learner())
    before = state(learn)
    explain_step(learn)
    assert learn.opt is None and all(map(same, before, state(learn)))

def test_draw_learner():
    learn = quiet(image_learner())
    g = draw_graph(learn)
    assert {'forward/0', 'forward/1', 'forward/loss', 'backward/0', 'backward/1', 'update'} <= set(g.boxes)
    assert ([k for k in g.forward.boxes if k.startswith('forward/')] == ['forward/0', 'forward/1', 'forward/loss']
            and g.forward.edges['forward/0', 'forward/1'] == [Shape('f32', (16, 8, 4, 4))])
    assert list(g.backward.boxes)[:3] == ['backward/loss', 'backward/1', 'backward/0']      # against the forward's order
    deep = g.view('forward', 2)
    assert ({'forward/0.0', 'forward/1.0', 'forward/1.3'} <= set(deep.boxes)
            and sum(len(b.nodes) for b in deep.boxes.values()) == sum(len(b.nodes) for b in g.forward.boxes.values()))
    assert Counter(n.op for n in g.forward.nodes)['aten::convolution_overrideable'] == 2

def test_svg():
    "A picture that is valid XML, with one box for each box and one line for each edge"
    g = draw_graph(quiet(image_learner())).view('', 2)
    root = ET.fromstring(g._repr_html_())
    tags = Counter(e.tag.split('}')[1] for e in root.iter())
    assert tags['rect'] == len(g.boxes) and tags['path'] == len(g.edges)+1       # and the arrow's head
    assert any('f32[16,8,4,4]' in (e.text or '') for e in root.iter())

def test_draw_model():
    net = convnet()
    before = [t.clone() for t in net.state_dict().values()]
    s,x = rng_state(),torch.randn(4, 1, 8, 8)
    with count_xla() as c: g = draw_graph(net, x)
    assert {'forward/0', 'forward/1', 'backward/0', 'backward/1'} <= set(g.boxes)
    assert all(map(torch.equal, before, net.state_dict().values()))
    assert all(p.grad is None for p in net.parameters()) and rng_state() == s
    assert not c.compiles and not c.executions                  # drawn, not run
    with pytest.raises(TypeError, match='input'): draw_graph(net)

def test_diff():
    "Counts of operators that differ, worked out by hand; none for one model twice"
    x,lin = torch.randn(4, 8),lambda: nn.Linear(8, 8)
    a,b = (draw_graph(nn.Sequential(lin(), act, lin()), x, phase='forward') for act in (nn.ReLU(), nn.Tanh()))
    assert not len(diff_graphs(a, draw_graph(nn.Sequential(lin(), nn.ReLU(), lin()), x, phase='forward')))
    df = diff_graphs(a, b).set_index('op')
    assert df[['a', 'b']].T.to_dict('list') == {'aten::relu': [1, 0], 'aten::tanh': [0, 1]} and set(df.shapes) == {'f32[4,8]'}
    wide = diff_graphs(a, draw_graph(nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 8)), x, phase='forward'))
    assert {'f32[4,9]', 'f32[4,8]'} <= set(wide.shapes)
    with pytest.raises(TypeError): diff_graphs(a, b.hlo)
    assert len(diff_graphs(a.hlo, b.hlo)) and not len(diff_graphs(a.hlo, a.hlo))

def test_files(tmp_path):
    g = draw_graph(nn.Sequential(nn.Linear(8, 3), nn.ReLU()), torch.randn(4, 8))
    for ext in 'txt hlo dot svg'.split(): g.save(tmp_path/f'g.{ext}')
    again = Graph((tmp_path/'g.txt').read_text(), (tmp_path/'g.hlo').read_text())
    assert not len(diff_graphs(g, again)) and Hlo(again.hlo).outputs == Hlo(g.hlo).outputs and len(Hlo(g.hlo).find('dot')) >= 2
    dot = (tmp_path/'g.dot').read_text()
    assert dot.startswith('digraph') and dot.count('->') == len(g.edges) and dot.count('shape=box') == len(g.boxes)
    ET.fromstring((tmp_path/'g.svg').read_text())
    with pytest.raises(ValueError, match='.hlo'): g.save(tmp_path/'g.pdf')

dot_script = '''#!{python}
import sys
text = sys.stdin.read()
if {fails}: sys.exit('Error: syntax error')
print('<?xml version="1.0"?><!DOCTYPE svg><svg by="graphviz" how="' + sys.argv[1] + '">' + str(text.count('->')) + '</svg>')
'''

@pytest.mark.parametrize('fails', [False, True, None])
def test_graphviz(tmp_path, monkeypatch, fails):
    "graphviz's `dot` draws where there is one; where there is none, or it fails, the picture is our own"
    g = draw_graph(nn.Linear(8, 3), torch.randn(4, 8))
    if fails is not None:
        (tmp_path/'dot').write_text(dot_script.format(python=sys.executable, fails=fails))
        (tmp_path/'dot').chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path))
    svg = f'<svg by="graphviz" how="-Tsvg">{len(g.edges)}</svg>'
    g.save(tmp_path/'g.svg')
    for s in (g._repr_html_(), (tmp_path/'g.svg').read_text()):
        assert s.strip() == svg if fails is False else 'graphviz' not in s and ET.fromstring(s).tag.endswith('svg')
    assert repr(g).startswith('step: ')

def test_large_is_text():
    deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    g = draw_graph(deep, torch.randn(2, 4))
    assert len(g.boxes) > 80 and g._repr_html_().startswith('<pre>') and g.forward._repr_html_().startswith('<svg')

def test_needs_xla():
    for f in (explain_step, draw_graph, lambda l: l.show_lowering_ops()):
        with pytest.raises(RuntimeError, match='to_xla'): f(image_learner())
