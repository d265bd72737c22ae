"What leaves the device: checkpoints, exports, detached learners, lr_find that is interrupted"
import subprocess, sys
import pytest, torch
from fastai.vision.all import *
from fastai.callback.all import *
from fastai_xla.all import *
from fastai_xla.runtime import is_xla
from fastai_xla.transfer import fetch
from common import *

def quiet(**kwargs): return image_learner(**kwargs).remove_cb(ProgressCallback)
def weights(learn): return fetch({k: v.clone() for k,v in learn.model.state_dict().items()})
def same(a, b, tol=0.): return all((a[k].float()-b[k].float()).abs().max() <= tol*b[k].float().abs().max().clamp(min=1e-3) for k in b)

blocked = '''
import sys, warnings, torch
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch_xla', '_XLAC', 'fastai_xla'): raise ImportError(f'{name} is not here')
sys.meta_path.insert(0, Block())
warnings.simplefilter('ignore')
sys.path.insert(0, 'tests')
from fastai.vision.all import *
learn = load_learner(sys.argv[1])
x = torch.load(sys.argv[2])
with torch.no_grad(): pred = learn.model(x)
torch.save(pred, sys.argv[2])
assert {p.device.type for p in learn.model.parameters()} == {'cpu'}
print([type(c).__name__ for c in learn.cbs])
'''

def test_export_needs_neither(tmp_path):
    "export -> load_learner, where importing torch_xla and fastai_xla raises"
    learn = quiet(path=tmp_path, dls=image_dls(after_batch=[Normalize.from_stats([.1], [.9], cuda=False)]),
                  cbs=[MixUp(), GradientClip(1.)], loss_func=CrossEntropyLossFlat(weight=torch.ones(4))).to_xla()
    with learn.no_logging(): learn.fit(1, 1e-2)
    before,x = weights(learn),torch.randn(2, 1, 8, 8)
    learn.export()
    assert is_xla(next(learn.model.parameters())) and same(weights(learn), before)
    expected = learn.model.eval()(x.to(learn.xla_opt.device)).cpu()
    torch.save(x, tmp_path/'x.pt')
    res = subprocess.run([sys.executable, '-c', blocked, str(tmp_path/'export.pkl'), str(tmp_path/'x.pt')],
                         capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert res.returncode == 0, res.stderr
    assert 'XLA' not in res.stdout
    assert (torch.load(tmp_path/'x.pt')-expected).abs().max() < 1e-5
    with learn.no_logging(): learn.fit(1, 1e-2)

def test_export_and_copy_after_random_lighting(tmp_path):
    "A transform keeps its last draw; that of a trace is never computed, and reading it for the file raised"
    learn = quiet(path=tmp_path, dls=image_dls(after_batch=[Brightness(p=1.), Contrast(p=1.)])).to_xla()
    with learn.no_logging(): learn.fit(2, 1e-2)
    assert not learn.xla_report().plain
    learn.export()
    assert len(deepcopy(learn).dls.train.after_batch.fs) == len(learn.dls.train.after_batch.fs)
    with learn.no_logging(): learn.fit(1, 1e-2)

optimizers = pytest.mark.parametrize('opt', [Adam, ranger, partial(OptimWrapper, opt=torch.optim.AdamW)], ids=['adam', 'ranger', 'torch'])

@optimizers
def test_checkpoint_continues(opt, tmp_path):
    "Load with optimizer state, and the run goes on with the losses of the one that was not interrupted"
    def start():
        torch.manual_seed(0)
        return quiet(path=tmp_path, opt_func=opt, dls=image_dls(shuffle=False)).to_xla()
    whole = start()
    with whole.no_logging():
        whole.fit(1, 1e-2)
        whole.save('half')
        whole.fit(1, 1e-2)
    other = start()
    with other.no_logging():
        other.load('half')
        other.fit(1, 1e-2)
    assert [l.item() for l in other.recorder.losses] == [l.item() for l in whole.recorder.losses]
    assert same(weights(other), weights(whole))

def test_checkpoint_is_a_cpu_checkpoint(tmp_path):
    learn = quiet(path=tmp_path).to_xla()
    with learn.no_logging(): learn.fit(1)
    learn.save('m')
    cpu = quiet(path=tmp_path)
    cpu.load('m')
    assert same(cpu.model.state_dict(), weights(learn))
    cpu.save('m2')
    a,b = torch.load(tmp_path/'models/m.pth', weights_only=False),torch.load(tmp_path/'models/m2.pth', weights_only=False)
    assert (a.keys() == b.keys() and list(a['model']) == list(b['model'])
            and [s.keys() for s in a['opt']['state']] == [s.keys() for s in b['opt']['state']])

@optimizers
def test_detach(opt, tmp_path):
    "After detach_xla the next steps on the CPU equal those of a learner that never left"
    runs = []
    for stay in (True, False):
        set_seed(5)
        learn = quiet(path=tmp_path, opt_func=opt, dls=image_dls(n=4*16, shuffle=False), wd=.1)
        if not stay: learn.to_xla()
        with learn.no_logging():
            learn.freeze()
            learn.fit(1, 1e-3)
            learn.unfreeze()
            learn.fit(1, 1e-3)
            learn.detach_xla()
            assert not hasattr(learn, 'xla_opt') and learn.dls.device.type == 'cpu'
            learn.fit(1, 1e-3)
        runs.append((learn.model.state_dict(), learn.recorder.losses))
    (a,la),(b,lb) = runs
    for x,y in zip(la, lb): assert abs(x-y) < 1e-5*max(1, abs(x))
    assert same(b, a, 1e-4)

def test_lr_find_restores(tmp_path):
    learn = quiet(path=tmp_path).to_xla()
    with learn.no_logging(): learn.fit(1)
    before = weights(learn)
    res = learn.lr_find(num_it=20, show_plot=False)
    assert 1e-7 < res.valley < 10 and same(weights(learn), before)
    assert len(learn.recorder.losses) == len(learn.recorder.lrs)

class Stop(Callback):
    order = 55
    def __init__(self, at, ex): self.at,self.ex = at,ex
    def after_batch(self):
        if self.training and self.train_iter == self.at: raise self.ex

def test_lr_find_interrupted(tmp_path):
    learn = quiet(path=tmp_path, cbs=Stop(9, KeyboardInterrupt())).to_xla()
    before = weights(learn)
    with pytest.raises(KeyboardInterrupt): learn.lr_find(num_it=20, end_lr=100, show_plot=False)
    assert same(weights(learn), before)
    learn.remove_cb(Stop)
    with learn.no_logging(): learn.fit(1)

def test_lr_find_stops_where_fastai_stops(tmp_path, monkeypatch):
    "Whatever ran beyond the point of divergence is cut off, however seldom the losses are looked at"
    import fastai_xla.transfer as transfer
    found = []
    for xla,every in ((False, 1.), (True, 1e9), (True, 0.)):
        monkeypatch.setattr(transfer, 'look_every', every)
        set_seed(2)
        learn = quiet(path=tmp_path, opt_func=SGD, dls=image_dls(shuffle=False))
        if xla: learn.to_xla()
        learn.lr_find(num_it=60, end_lr=1e4, show_plot=False, suggest_funcs=None)
        found.append((learn.recorder.lrs, [l.item() for l in learn.recorder.losses]))
    (a,la),(b,lb),(c,lc) = found
    assert a == b == c and len(a) < 60
    for x,y,z in zip(la, lb, lc): assert abs(x-y) < 1e-3*abs(x) and y == z

class Spoil(Callback):
    run_valid = False
    def after_loss(self):
        if self.train_iter == 11: self.learn.loss_grad = self.loss_grad*float('nan'); self.learn.loss = self.loss_grad.clone()

def ends_as_fastai(cb, tmp_path):
    ends = []
    for xla in (False, True):
        learn = quiet(path=tmp_path, cbs=[Spoil(), cb()])
        if xla: learn.to_xla()
        with learn.no_logging(): learn.fit(3)
        ends.append((len(learn.recorder.losses), len(learn.recorder.lrs), len(learn.recorder.values)))
    assert ends[0] == ends[1] == (11, 11, 1)

@pytest.mark.parametrize('every', [1e9, 0.])
def test_terminate_on_nan(every, tmp_path, monkeypatch):
    "The records end where fastai's end, however seldom the device is asked"
    import fastai_xla.transfer as transfer
    monkeypatch.setattr(transfer, 'look_every', every)
    ends_as_fastai(TerminateOnNaNCallback, tmp_path)

def test_nan_where_the_callback_comes_within_the_fit(tmp_path):
    class Adds(Callback):
        def after_batch(self):
            if self.training and self.train_iter == 3: self.learn.add_cb(TerminateOnNaNCallback())
    ends_as_fastai(Adds, tmp_path)

@pytest.mark.parametrize('event,ex', [('after_pred', KeyboardInterrupt), ('after_pred', ValueError), ('before_step', ValueError),
                                      ('after_batch', KeyboardInterrupt), ('after_epoch', ValueError)])
def test_usable_after_exception(event, ex, tmp_path):
    "A fit that breaks off anywhere leaves a learner that trains as before, and MixUp's loss put back"
    class Break(Callback): pass
    def strike():
        if learn.train_iter == 3 or event == 'after_epoch': raise ex('broken')
    cb = Break()
    setattr(cb, event, strike)
    learn = quiet(path=tmp_path, cbs=[MixUp(), CSVLogger()]).to_xla()
    loss = learn.loss_func
    with pytest.raises(ex), learn.no_logging(): learn.fit(1, cbs=cb)
    # a batch that breaks off between backward and update leaves its gradients, as without XLA
    assert learn.loss_func is loss and all((p.grad is None) == (event != 'before_step') for p in learn.model.parameters())
    assert all(not is_xla(l) for l in learn.recorder.losses)
    with learn.no_logging(): learn.fit(2)
    cost = learn.xla_report().per_batch()
    assert cost['executions'] == 1 and cost['compiles'] == 0
