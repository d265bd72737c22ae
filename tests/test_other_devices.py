"With fastai_xla imported, training on the CPU is bit-identical to training without it"
import subprocess, sys
import own_process

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

def ran(how):
    res = subprocess.run([sys.executable, '-c', code, how], cwd='tests', capture_output=True, text=True)
    assert res.returncode == 0, res.stderr
    return [l for l in res.stdout.splitlines() if l.startswith('RUN')]

def test_bit_identical():
    without,with_ = ran('without'),ran('with')
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
if 'before' in sys.argv: patched('before')
if 'with' in sys.argv: from fastai_xla.all import *
if 'after' in sys.argv: patched('after')
order,ds = [],[(torch.zeros(2), torch.zeros(1))]*8
learn = Learner(DataLoaders.from_dsets(ds, ds, bs=4, num_workers=0, device='cpu'), nn.Linear(2, 1), loss_func=MSELossFlat())
with learn.no_bar(), learn.no_logging():
    learn.freeze_to(0)
    learn.fit(1)
    if 'with' in sys.argv: learn.to_xla().fit(1)
assert order[0] == sys.argv[1] and len(order) == 1 + 4*(1 + ('with' in sys.argv)), order
'''

def test_packages_that_patch_the_same_methods(tmp_path):
    "Before this one is imported, or after it; as without it"
    for args in ('before',), ('before', 'with'), ('after', 'with'):
        res = own_process.run(['-c', patched, *args], tmp_path, tmp_path)
        assert res.returncode == 0, (args, res.stderr[-2000:])
