"With fastai_xla imported, training on the CPU is bit-identical to training without it"
import json, subprocess, sys
from pathlib import Path
import own_process, pytest

code = '''
import hashlib, sys, tempfile, warnings
warnings.simplefilter('ignore')
from fastai.vision.all import *
from fastai.callback.all import *
if sys.argv[1] == 'with': from fastai_xla.all import *
from common import convnet, image_dls, params_of
assert ('fastai_xla' in sys.modules) == (sys.argv[1] == 'with')

def digest(*ts):
    h = hashlib.sha256()
    for t in ts: h.update(t.detach().numpy().tobytes())
    return h.hexdigest()[:16]

runs = dict(sgd=(partial(SGD, mom=.9), []), adam=(Adam, [MixUp()]), lamb=(Lamb, [GradientClip(.1), SaveModelCallback()]),
    larc=(Larc, [GradientAccumulation(32)]), ranger=(ranger, [TerminateOnNaNCallback(), ReduceLROnPlateau()]),
    radam=(RAdam, []), rmsprop=(RMSProp, [EarlyStoppingCallback()]), qhadam=(QHAdam, []),
    torch=(partial(OptimWrapper, opt=torch.optim.AdamW), [TerminateOnNaNCallback()]))
for name,(opt,cbs) in runs.items():
    set_seed(3, reproducible=True)
    with tempfile.TemporaryDirectory() as d:
        learn = Learner(image_dls(n=8*16), convnet(), loss_func=CrossEntropyLossFlat(), metrics=[accuracy, F1Score(average='macro')],
                        splitter=params_of, opt_func=opt, path=d, cbs=cbs).remove_cb(ProgressCallback)
        with learn.no_logging():
            learn.lr_find(num_it=10, show_plot=False)
            learn.freeze()
            learn.fit(1)
            learn.unfreeze()
            learn.fit_one_cycle(1, 1e-2)
        learn.export()
        with learn.no_logging(): learn.fit(1)
        print('RUN', name, digest(*learn.model.state_dict().values()), digest(*learn.recorder.losses),
              [float(o) for o in learn.recorder.values[-1]], digest(*learn.get_preds()))
'''

def ran(how, tmp_path):
    if how == 'without': res = subprocess.run([sys.executable, '-c', code, how], cwd='tests', capture_output=True, text=True)
    else: res = own_process.run(['-c', code, how], tmp_path, cwd=Path('tests').absolute())   # which has imported torch_xla
    assert res.returncode == 0, res.stderr
    return [l for l in res.stdout.splitlines() if l.startswith('RUN')]

def test_bit_identical(tmp_path):
    without,with_ = ran('without', tmp_path),ran('with', tmp_path)
    assert len(without) == 9
    assert without == with_

def test_replaced_methods_keep_their_documentation():
    import fastai_xla.all
    classes = {c for m in list(sys.modules.values()) if getattr(m, '__name__', '').startswith('fastai.')
               for c in vars(m).values() if isinstance(c, type)}
    pairs = [(c, k[7:], vars(c)[k[7:]], v) for c in classes if c.__module__.startswith('fastai.')
             for k,v in list(vars(c).items()) if k.startswith('_under_') and k[7:] in vars(c)]
    ours = [(f'{c.__name__}.{n}', f, orig) for c,n,f,orig in pairs if getattr(f, '__module__', '').startswith('fastai_xla')]
    assert len(ours) > 30
    assert not [n for n,f,orig in ours if orig.__doc__ and f.__doc__ != orig.__doc__]

patched = '''
from fastai.basics import *
def patched(who):
    @patch
    def freeze_to(self:Learner, n):
        order.append(who)
        self._orig_freeze_to(n)
    @patch
    def after_batch(self:Recorder):
        order.append(who)
        self._orig_after_batch()
if sys.argv[1] == 'before': patched('before')
from fastai_xla.all import *
if sys.argv[1] == 'after': patched('after')
order,ds = [],[(torch.zeros(2), torch.zeros(1))]*8
learn = Learner(DataLoaders.from_dsets(ds, ds, bs=4, num_workers=0, device='cpu'), nn.Linear(2, 1), loss_func=MSELossFlat())
with learn.no_bar(), learn.no_logging():
    learn.freeze_to(0)
    learn.fit(1)
    learn.to_xla().fit(1)
assert order == sys.argv[1:]*9, order
'''

@pytest.mark.parametrize('when', ['before', 'after'])
def test_packages_that_patch_the_same_methods(tmp_path, when):
    "A freeze, and four batches each on the CPU and on XLA"
    res = own_process.run(['-c', patched, when], tmp_path, tmp_path)
    assert res.returncode == 0, res.stderr[-2000:]

heard = '''
from fastai.text.all import *
import json
when,names,order = sys.argv[1],sys.argv[3:],[]
def hear(c, name):
    f = getattr(c, name, noop)
    def _inner(self, *args, **kwargs):
        order.append(f'{c.__name__}.{name}')
        return f(self, *args, **kwargs)
    setattr(c, name, _inner)
def package(): [hear(globals()[c], n) for c,n in (o.split('.') for o in names)]
if when == 'before': package()
if sys.argv[2] != 'without': from fastai_xla.all import *
if when == 'after': package()
set_seed(0)
ds = [(torch.randn(4), torch.tensor(i%2)) for i in range(16)]
dls = DataLoaders(*(SortedDL(ds, bs=4, sort_func=lambda o: 0, num_workers=0) for _ in range(2)))
cbs = [MixUp(), TerminateOnNaNCallback()]
learn = Learner(dls, nn.Linear(4, 2), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs)
if sys.argv[2] == 'xla': learn.to_xla()
with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
print(json.dumps([order, [float(o) for o in learn.recorder.losses]]))
'''

# that fastai calls in each step or each epoch, and those that its class has of another, or does not have
alone = '''Learner.__call__ Learner._call_one Learner.all_batches Learner.one_batch Learner._do_one_batch Learner._set_device
Optimizer.zero_grad Optimizer.step Recorder.after_batch AvgSmoothLoss.accumulate AvgMetric.accumulate MixUp.before_batch
TerminateOnNaNCallback.after_batch DataLoader.do_batch'''.split()
around = 'Learner.create_opt Recorder.after_fit TerminateOnNaNCallback.before_train TerminateOnNaNCallback.after_train'
methods = [*alone, *around.split()]

def hear(tmp_path, *args):
    res = own_process.run(['-c', heard, *args], tmp_path, tmp_path)
    assert res.returncode == 0, (args, res.stderr[-2000:])
    return json.loads(res.stdout.splitlines()[-1])

@pytest.fixture(scope='module')
def on_cpu(tmp_path_factory): return hear(tmp_path_factory.mktemp('cpu'), 'before', 'without', *methods)

@pytest.mark.parametrize('when', ['before', 'after'])
def test_calls_are_heard_in_their_order(tmp_path, on_cpu, when):
    assert {*on_cpu[0]} == {*methods}
    assert hear(tmp_path, when, 'with', *methods) == on_cpu

later = 'Learner._call_one Learner.one_batch Learner._set_device Optimizer.step MixUp.before_batch DataLoader.do_batch'.split()

@pytest.mark.parametrize('names,when', [*((n, 'before') for n in (*alone, around)), *((n, 'after') for n in later)])
def test_calls_are_heard_on_xla(tmp_path, on_cpu, names, when):
    "Each alone: one that is heard as Python at each step would have the others heard too. Those around passes have no part in steps"
    order,losses = hear(tmp_path, when, 'xla', *names.split())
    assert order == [n for n in on_cpu[0] if n in names.split()]
    assert len(losses) == len(on_cpu[1]) and max(abs(a-b) for a,b in zip(losses, on_cpu[1])) < 1e-6

both = '''
from fastai.vision.all import *
import warnings
def package():
    @patch
    def reset(self:Dice): self._orig_reset()
    @patch
    def before_fit(self:Recorder): self._orig_before_fit()
    @patch
    def fit(self:Learner, *args, **kwargs): return self._orig_fit(*args, **kwargs)
package()
from fastai_xla.all import *
if 'twice' in sys.argv:
    from fastcore.basics import patch
    package()
ds = [(torch.rand(3, 4, 4), torch.ones(4, 4).long())]*8
dls = DataLoaders.from_dsets(ds, ds, bs=4, num_workers=0, device='cpu')
learn = Learner(dls, nn.Conv2d(3, 2, 1), loss_func=CrossEntropyLossFlat(axis=1), metrics=Dice())
with learn.no_bar(), learn.no_logging(), warnings.catch_warnings(record=True) as told:
    learn.fit(2)
    warnings.simplefilter('always')
    learn.to_xla()
told = [str(w.message) for w in told if 'no longer runs' in str(w.message)]
assert len(told) == ('twice' in sys.argv), told
for n in ('Dice.reset', 'Recorder.before_fit', 'Learner.fit') if told else (): assert n in told[0], told
'''

@pytest.mark.parametrize('args', [(), ('twice',)])
def test_packages_before_and_after(tmp_path, args):
    "fastcore's `patch` goes past what is between two of them: on the CPU nothing needs that, and `to_xla` tells"
    res = own_process.run(['-c', both, *args], tmp_path, tmp_path)
    assert res.returncode == 0, res.stderr[-2000:]
