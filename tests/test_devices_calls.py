"""What `to_xla(devices=...)` says and does where it is called late, wrongly or twice; each in a process of its own"""
import pytest
from test_devices import python

head = """
import os, sys, warnings
import torch_xla.distributed.spmd as spmd
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla import cases
from fastai_xla.mesh import layout, mesh, n_devices
from fastai_xla.transfer import fetch
warnings.simplefilter('ignore')
def learner(): return cases.images().add_cb(Callback())
def tells(f, *args, **kwargs):
    try: f(*args, **kwargs)
    except (ValueError, RuntimeError) as e: print(type(e).__name__, e)
    else: print('no error')
"""

def says(code, n=4, **env): return python(['-c', head+code], n, **env)

refused = [
    ("tells(learner().to_xla, devices=3)", 'ValueError|this process has 4|CPU_NUM_DEVICES'),
    ("tells(learner().to_xla, devices='both')", "ValueError|this takes 'all'"),
    ("tells(learner().to_xla, devices=9)", 'ValueError|this process has 4'),
    ("tells(learner().to_xla, 1, devices='all')", 'ValueError|one device, or all of them'),
    ("tells(learner().to_xla, devices='all', shard='zero')", "ValueError|this takes 'fsdp'"),
    ("tells(learner().to_xla, mesh=spmd.Mesh(range(4), (2, 2), ('x', 'y')))", "ValueError|the axis 'data'"),
    ("tells(learner().to_xla, devices='all')", 'no error')]

def test_wrong_arguments_are_refused_and_decide_nothing():
    out = says('\n'.join(code for code,_ in refused)).splitlines()
    for line,(code,words) in zip(out, refused, strict=True): assert all(w in line for w in words.split('|')), (code, line)

@pytest.mark.parametrize('code,words', [
    ("torch.ones(2, device='xla'); tells(learner().to_xla, devices='all')", 'RuntimeError|has used one of its 4 devices already'),
    ("learner().to_xla(devices='all'); tells(learner().to_xla, devices=1)", 'ValueError|Restart Python to use one device')])
def test_errors(code, words):
    out = says(code)
    assert all(w in out for w in words.split('|')), out

def test_one_of_four_is_told_once_and_decides():
    out = says("""
with warnings.catch_warnings(record=True) as w:
    warnings.simplefilter('always')
    learner().to_xla(), learner().to_xla()
print([str(o.message) for o in w if 'devices' in str(o.message)])
tells(learner().to_xla, devices='all')""")
    assert out.count("1 of 4 devices is used: `learn.to_xla(devices='all')`") == 1
    assert all(w in out.splitlines()[1] for w in ('RuntimeError', 'has used one of its 4 devices', 'Restart the notebook')), out

def test_world_size():
    four,one = says("tells(learner().to_xla); os.environ['WORLD_SIZE'] = '1'; tells(learner().to_xla)", n=1, WORLD_SIZE='4').splitlines()
    assert 'RuntimeError' in four and 'WORLD_SIZE is 4' in four
    assert one == 'no error'

def test_uneven_is_told():
    out = says("""
learn = learner()
learn.dls = DataLoaders(*[dl.new(bs=18) for dl in learn.dls.loaders])
with warnings.catch_warnings(record=True) as w:
    warnings.simplefilter('always')
    learn.to_xla(devices='all')
print([str(o.message) for o in w])""")
    assert 'A batch of 18 cannot be split evenly over 4 devices' in out

def test_embeddings_of_an_uneven_batch():
    "XLA's partitioner would end the process"
    out = says("""
df = pd.DataFrame(dict(u=[i%20 for i in range(300)], i=[i%15 for i in range(300)], r=[i%5 for i in range(300)]))
learn = collab_learner(CollabDataLoaders.from_df(df, bs=30, seed=1, num_workers=0), n_factors=8, y_range=(0, 5.5), opt_func=SGD)
learn.to_xla(devices='all')
with learn.no_bar(), learn.no_logging(): learn.fit(1)
print(len(learn.recorder.losses))""".replace('df =', 'from fastai.collab import *; df =', 1))
    assert out.strip() == '8'

def test_callbacks_see_gradients_of_split_parameters():
    out = says("""
def fitted(shard, cb):
    set_seed(0)
    learn = cases.images(opt_func=SGD, cbs=cb).to_xla(devices='all', shard=shard)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-1)
    return [l.item() for l in learn.recorder.losses]
plain = fitted('fsdp', None)
for cb in (partial(GradientClip, .05), partial(SAM, .5)):
    a,b = fitted(None, cb()),fitted('fsdp', cb())
    print(max(abs(x-y) for x,y in zip(a, b)) < 1e-5, max(abs(x-y) for x,y in zip(plain, b)) > 1e-3)""")
    assert out.splitlines() == ['True True']*2, out

def test_a_model_writes_into_split_parameters():
    "In its forward pass, by torch's code and by its own: what it had were copies, and what it wrote was lost"
    out = says("""
class Unit(nn.Linear):
    def forward(self, x):
        with torch.no_grad(): self.weight.copy_(F.normalize(self.weight, dim=1))
        self.bias.data = self.bias.data.clamp(max=.01)
        return super().forward(x)*sum(isinstance(p, nn.Parameter) for p in self.parameters())
def fitted(head, **to):
    set_seed(0)
    items = [(x, x[0]%4) for x in torch.randint(40, (112, 8))]
    dls = DataLoaders.from_dsets(items[:96], items[96:], bs=16, num_workers=0, shuffle=False)
    model = nn.Sequential(nn.Embedding(40, 8, max_norm=.5), nn.Flatten(), head(64, 4))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=SGD)
    if to: learn.to_xla(**to)
    with learn.no_bar(), learn.no_logging(): learn.fit(2, .5)
    return learn
for head in (nn.Linear, Unit):
    on_cpu,learn = fitted(head),fitted(head, devices='all', shard='fsdp')
    pairs = [*zip(on_cpu.model.parameters(), learn.model.parameters())]
    print(max((a-fetch(b.detach())).abs().max().item() for a,b in pairs) < 1e-5, {'devices' in layout(b) for _,b in pairs},
        len(learn.xla_report().plain))""")
    library,own = out.splitlines()
    assert (library, own) == ('True {True} 0', 'True {True} 1'), out

def test_any_and_all_of_numbers_over_the_devices():
    "XLA does not know how several devices tell each other of numbers"
    out = says("""
class Asks(Callback):
    def after_pred(self):
        x,y = self.x,self.y
        self.found = [(x > 9).float().any(), x.all(), y.any(), y.to(torch.uint8).all(), x.flatten(1).all(0), x.isnan().any()]
def found(**to):
    set_seed(0)
    learn = cases.images(opt_func=SGD, cbs=Asks())
    if to: learn.to_xla(**to)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return [(t.dtype, t.tolist()) for t in fetch(learn.asks.found)]
print(found() == found(devices='all'))""")
    assert out.strip() == 'True', out

def test_seed_before_the_devices():
    "To seed does not decide for one device; and the seed holds"
    code = """
for seed in (5, 5, 6):
    manual_seed(seed)
    learner().to_xla(devices='all')
    print(fetch(torch.rand(4, device='xla')).tolist())"""
    before,again,other = says(code).splitlines()
    assert says(code, n=1).splitlines() == [before, again, other] and before == again != other

def test_one_device_is_no_mesh():
    assert 'None' in says("learner().to_xla(devices='all', shard='fsdp'); print(mesh())", n=1)

@pytest.mark.parametrize('event,module', [('after_pred', 'program'), ('after_train', 'guards')], ids=['logged', 'recorded'])
def test_layout_is_guarded(event, module):
    "A program for weights that each device has does not serve weights that are split"
    out = says("""
from fastai_xla.capture import MODULE
from fastai_xla.mesh import lay_out
class Turn(Callback):
    def EVENT(self): self.n = len(self.pred)   # code of the step, or not
    def after_batch(self):
        if self.training and self.iter == 5: lay_out(next(self.learn.model.parameters()), ('data',))
def losses(guarded):
    MODULE.layout = layout if guarded else lambda t: ''
    set_seed(0)
    learn = cases.images(cbs=Turn(), opt_func=SGD)
    learn.to_xla(devices='all')
    with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
    assert bool(learn.xla_opt.replay.by_log) == ('MODULE' == 'program') and not learn.xla_report().plain
    return learn.recorder.losses
plain = losses(True)
set_seed(0)
learn = cases.images(opt_func=SGD).to_xla()
with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
print('APART', max(abs(a-b) for a,b in zip(plain, learn.recorder.losses)).item() < 1e-5)
try: wrong = losses(False)
except Exception as e: print('SEEN')
else: print('SEEN' if max(abs(a-b) for a,b in zip(wrong, plain)) > 1e-3 else 'NOT SEEN')""".replace('MODULE', module)
               .replace('EVENT', event))
    assert 'APART True' in out and '\nSEEN' in out, out

def test_layouts_within_a_step():
    "`mark_sharding` in the user's model is given the tensor itself, and the step is retraced"
    out = says("""
class Marks(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x):
        spmd.mark_sharding(x, mesh(), ('data', None, None, None))
        return self.model(x)
def losses(mark):
    set_seed(0)
    learn = cases.images(opt_func=SGD)
    if mark: learn.model,learn.splitter = Marks(learn.model),trainable_params
    learn.to_xla(devices='all')
    with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
    return torch.stack(list(learn.recorder.losses)),dict(learn.xla_report().plain)
(a,_),(b,why) = losses(False),losses(True)
print((a-b).abs().max().item() < 1e-5, len(a), list(why))""")
    assert out.startswith('True 12') and 'lays a tensor out on the devices' in out, out

def test_second_device():
    "Dropout on a second device alone: replayed as retraced"
    out = says("""
def losses(replay):
    set_seed(0)
    learn = cases.numbers().to_xla(1, replay=replay)
    manual_seed(3)
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-3)
    assert next(learn.model.parameters()).device.index == 1
    return learn.recorder.losses,learn.xla_report()
(a,_),(b,report) = losses(False),losses('auto')
print(max(abs(x-y) for x,y in zip(a, b)).item() < 1e-6, len(a))
print(report)""")
    assert out.startswith('True 32') and 'training batch' in out, out
    assert '1.00' in out.split('training batch')[1].splitlines()[0]

def test_compiled_for_a_tpu():
    "Weights are gathered and activations are not: what is gathered does not grow with the batch. Parameters are read in parts"
    pytest.importorskip('libtpu')
    out = says("""
from tests.many import words
def compiled(shard, size):
    learn = words().to_xla(devices='all', shard=shard)
    return learn.tpu_report('v5e-4', size=size, valid=False, verbose=False)
small,large,whole = compiled('fsdp', 16),compiled('fsdp', 64),compiled(None, 16)
print(small.collectives.loc['all-gather', 'bytes'] == large.collectives.loc['all-gather', 'bytes'] > 0)
print(set(whole.collectives.index) == {'all-reduce'}, whole.collectives.loc['all-reduce', 'count'] <= 3)
print(all(r.step.parts[p] < 1.05/4*whole.step.parts[p] for r in (small, large) for p in ('weights', 'optimizer')))
tells(words().to_xla().tpu_report, 'v5e-8')""")
    assert out.count('True') == 4 and 'False' not in out and 'This learner is on 4 devices' in out, out

def test_numbers_that_a_callback_keeps():
    "CutMix keeps a number on the device, of which nobody says how it is laid out: that is no other recording"
    out = says("""
learn = cases.images(cbs=CutMix()).to_xla(devices='all')
with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-3)
print(dict(learn.xla_opt.replay.fit.plain))""")
    assert out.strip() == '{}', out

def test_mesh_of_two_axes():
    "Rows of one layer and columns of the next are split over one axis, batches over the other; numbers are those of one device"
    code = """
from tests.many import words
set_seed(0)
learn = words()
axes = {'linear1.weight': ('model', None), 'linear2.weight': (None, 'model')}
def spec(name): return axes.get('.'.join(name.split('.')[-2:]))
if n_devices() == 1: learn.to_xla()
else: learn.to_xla(mesh=spmd.Mesh(range(4), (2, 2), ('data', 'model')), param_spec=spec)
manual_seed(7)
with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
print([l.item() for l in learn.recorder.losses])
print([layout(p) for k,p in learn.model.named_parameters() if 'linear' in k and p.dim() == 2][:2])
print(learn.xla_report().per_batch()['executions'], learn.xla_report().per_batch()['compiles'])"""
    (one,_,_),(four,layouts,cost) = (says(code, n=n).splitlines()[-3:] for n in (1, 4))
    assert max(abs(a-b) for a,b in zip(eval(one), eval(four))) < 1e-6
    assert eval(layouts) == [f'{{devices=[{parts},2]0,2,1,3 last_tile_dim_replicate}}' for parts in ('2,1', '1,2')]
    assert cost == '1.0 0.0'

def test_code_of_the_user():
    "What mixes, and where, is drawn on the host at each batch. It had been recorded as what the first batches drew"
    code = """
class Mix(Callback):
    run_valid = False
    def before_fit(self): self.r = np.random.RandomState(3)
    def before_batch(self):
        self.lam,self.perm = self.r.rand(),torch.from_numpy(self.r.permutation(len(self.x))).to(self.x.device)
        layer = [m for m in self.learn.model.modules() if isinstance(m, nn.Conv2d)][self.r.randint(2)]
        self.h = layer.register_forward_hook(lambda m,i,o: o*self.lam+o[self.perm]*(1-self.lam))
    def after_pred(self): self.h.remove()
set_seed(0)
learn = cases.images(cbs=Mix(), opt_func=SGD)
learn.to_xla(devices='all', shard=SHARD) if n_devices() > 1 else learn.to_xla(replay=False)
with learn.no_bar(), learn.no_logging(): learn.fit(2, .1)
print([l.item() for l in learn.recorder.losses])
print(learn.xla_report().per_batch()['executions'], learn.xla_report().per_batch()['fallbacks'])
if n_devices() > 1: print(learn.xla_opt.replay.by_log.fit.counts[True]['replayed'], dict(learn.xla_report().plain))"""
    one,_ = says(code, n=1).splitlines()[-2:]   # with no `SHARD`
    for shard,steady in ((None, 21), ('fsdp', 0)):
        four,cost,found = says(code.replace('SHARD', repr(shard))).splitlines()[-3:]
        assert max(abs(a-b) for a,b in zip(eval(one), eval(four), strict=True)) < 1e-5
        n,_,why = found.partition(' ')
        assert cost == '1.0 0.0' and int(n) == steady, found
        assert ('parameters are split over several devices, and Mix is code of yours' in why) == bool(shard), why
