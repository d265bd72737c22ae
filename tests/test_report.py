"""The report names what makes a fit slow, with the line, and nothing where nothing is wrong

    make test ARGS='tests/test_report.py'"""
import pytest, torch
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.op_watch import OpWatch
from fastai_xla.report import CostLog
from fastai_xla.explain import XLAReportCallback
from common import *
from planted import *

# What has been compiled in this process is not compiled again, and then there is no cause: images of sizes that no
# other test has (8 is all tests', 9 and 10 are test_planted's)
found,clean,library = 11,12,13

class Bool(Planted):
    def after_loss(self):
        if self.loss > 0: self.learn.seen = 1               # planted

class Host(Planted):
    def after_pred(self):
        self.learn.seen = self.pred.detach().cpu()          # planted

class Power(Planted):
    def after_loss(self):
        self.learn.seen = self.loss.detach() ** (2 + self.train_iter/10)   # planted

class Extra(Planted):
    def after_loss(self):
        if self.train_iter == 4: self.learn.seen = self.loss.detach().sin()   # planted

class Kept(Planted):
    def after_loss(self):
        t = self.loss.detach().cos()                        # planted
        if self.train_iter == 4: self.learn.seen = t

class Double(Planted):
    def before_batch(self):
        if self.train_iter == 4: self.learn.xb = (self.x.half().float(),)   # planted

@pytest.mark.parametrize('cb,kind,says', [(Bool, 'transfer', 'if'), (Host, 'transfer', '.cpu()'), (Power, 'constant', '2.0 became 2.1'),
                                          (Extra, 'operator', 'aten.sin'), (Kept, 'outputs', 'aten.cos'), (Double, 'operator', 'f16')])
def test_found(cb, kind, says):
    "The other causes; more in test_planted.py"
    n = 4 if cb is Power else 8   # which compiles at each batch
    learn,told = watched(cb(), dls=image_dls(n=n*16, size=found))
    causes = learn.xla_report().causes
    assert set(causes.cause) == {kind}, causes.to_string()
    assert all(line_of(cb) in l for l in causes.line), causes.line.tolist()
    assert any(says in w for w in causes.what), causes.what.tolist()
    assert len(told) == len(causes)                         # once each
    assert line_of(cb) in repr(learn.xla_report()) and all(line_of(cb) in t for t in told)

@pytest.mark.parametrize('kwargs',
    [dict(opt_func=SGD), dict(opt_func=RAdam), dict(cbs=[MixUp()]), dict(cbs=[GradientClip(.1)], metrics=None)],
    ids='SGD RAdam MixUp GradientClip'.split())
def test_clean(kwargs):
    "Negative control, with a learning rate that changes in each step"
    kwargs = dict(kwargs)
    set_seed(0)
    learn = image_learner(image_dls(size=clean), **kwargs).to_xla()
    learn.remove_cb(ProgressCallback)
    with learn.no_logging(): learn.fit_one_cycle(2, 1e-2, cbs=XLAReportCallback(warn=False))
    causes = learn.xla_report().causes
    # its rule changes at the sixth step
    if kwargs.get('opt_func') is RAdam: assert causes.cause.tolist() == ['operator'] and 'in radam_step' in causes.line[0]
    else: assert not len(causes) and 'no cause' in repr(learn.xla_report()), causes.to_string()

def test_clean_augmented():
    learn,told = watched(dls=image_dls(size=16, after_batch=[*aug_transforms(), Normalize.from_stats([.1], [.9], cuda=False)]))
    assert not told and not len(learn.xla_report().causes), learn.xla_report()

def test_library_line():
    "What is in fastai's code is told with fastai's line"
    learn,_ = watched(dls=image_dls(bs=12, size=library))   # 64 validation items: a last batch of 4
    causes = learn.xla_report().causes
    told = f'xb[0] f32[12,1,{library},{library}] became f32[4,1,{library},{library}]'
    assert set(causes.cause) == {'shape'} and all('fastai' in l for l in causes.line), causes.to_string()
    assert any(told in w for w in causes.what), causes.to_string()

def test_in_own_function():
    "The line is the user's innermost, and the fit's own line is no answer"
    def helper(t): return t.mean().item()
    learn,_ = watched(Callback(after_loss=lambda self: helper(self.loss.detach())))
    [line] = learn.xla_report().causes.line
    assert 'in helper' in line and 'learn.fit' not in line

@pytest.mark.parametrize('select,cure', [(lambda p, y: p[y > 0], '(each*mask).sum()/mask.sum()'),
    (lambda p, y: p[y == 1], 'torch.where(mask, a, b)'), (lambda p, y: p*len(y.unique()), 'F.one_hot(t, n).sum(0)'),
    (lambda p, y: p[y.nonzero()[:,0]], 'where the dataset makes its items')],
    ids='elements rows unique nonzero'.split())
def test_shapes_that_depend_on_values(select, cure):
    "What a mask selects: the batches have one shape, and the cure is another"
    def loss(p, y): return F.cross_entropy(p, y) + select(p, y.as_subclass(torch.Tensor)).pow(2).mean()
    learn = image_learner(loss_func=loss).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2)
    r = learn.xla_report(causes=True)
    assert 'how many elements it gives depends on values, and each new count compiles a program' in repr(r)
    cures = r.causes.cure[r.causes.cause.isin(['shape', 'fallback'])].tolist()
    assert cures and all(cure in c for c in cures), r.causes.to_string()

def test_a_read_within_another_library():
    "The line is the user's, on which there is no index"
    from torchvision.ops import complete_box_iou_loss
    def loss(p, y):
        box = torch.cat([p[:,:2].sigmoid()*.4, p[:,2:].sigmoid()*.4 + .5], 1).as_subclass(torch.Tensor)
        return complete_box_iou_loss(box, torch.zeros_like(box) + box.new_tensor([0., 0, 1, 1]), reduction='mean')
    learn = image_learner(loss_func=loss, metrics=None).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2)
    assert "__getitem__ at test_report.py, line " in repr(r := learn.xla_report())
    assert " (in torchvision's `complete_box_iou_loss`) reads a value" in repr(r)

def test_does_not_change():
    "Watched or not: the same numbers, the same programs, and the replay back in its place"
    def run(watch):
        set_seed(0)
        learn = image_learner().to_xla(replay=False)
        manual_seed(0)
        with learn.no_bar(), learn.no_logging():
            with count_xla() as c: learn.fit_one_cycle(1, 1e-2, cbs=[XLAReportCallback()]*watch)
        return [t.cpu() for t in learn.model.state_dict().values()],learn.recorder.losses,c
    (a,la,_),(b,lb,c) = run(False),run(True)
    assert all(torch.equal(x, y) for x,y in zip(a, b)) and la == lb and c.compiles == 0

def test_exception_ends_watch():
    class Fails(Callback):
        def after_loss(self):
            if self.training and self.train_iter == 2: raise ValueError('own')
    learn = image_learner(cbs=Fails()).to_xla()
    replay = learn.xla_opt.replay
    with pytest.raises(ValueError), learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=XLAReportCallback())
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack() and learn.xla_opt.replay is replay

def test_needs_xla():
    learn = image_learner()
    with pytest.raises(RuntimeError, match='to_xla'), learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=XLAReportCallback())

def test_afterwards():
    "A fit that has not been watched says how to find out, if it is not clean, and has its causes then; of a clean one there are none"
    for cb,n in ((Crop(), 1), (Item(), 1), (None, 0)):
        learn = image_learner(cbs=cb).to_xla(replay=False)
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
        assert ('XLAReportCallback' in repr(learn.xla_report())) == bool(n) and not len(learn.xla_report().causes)
        causes = learn.xla_report(causes=True).causes
        assert len(causes) == n, causes.to_string()

def test_mode_keeps_inplace():
    "Tensors made under the watch can be updated and viewed as outside of it"
    dev = device()
    def f():
        a = torch.zeros(2, 2, device=dev)
        a += 1
        a.view(4)[1:] *= 3
        b = torch.empty_like(torch.ones(2), device=dev).copy_(torch.ones(2))
        b[0] = 5
        return torch.cat([a.view(4), b]).cpu()
    with OpWatch(): res = f()
    assert torch.equal(res, f()) and res.tolist() == [1, 3, 3, 3, 5, 1]

def test_lowering_ops():
    learn = image_learner(cbs=Bessel()).to_xla()
    ops = learn.show_lowering_ops()
    assert (list(ops[ops.runs == 'CPU'].index) == ['aten.i0']
            and line_of(Bessel) in ops.line['aten.i0'] and ops.calls['aten.i0'] == 1)
    assert ops.calls['aten.convolution'] == 2 and ops.calls['aten.convolution_backward'] == 2        # the net has two
    clean = image_learner().to_xla().show_lowering_ops()
    assert not (clean.runs == 'CPU').any()
    grid = image_learner(dls=image_dls(size=16, after_batch=Rotate(p=1.))).to_xla().show_lowering_ops()
    assert (grid.runs == 'XLA, by fastai_xla').any()

# --- what has been recorded

class Smooths(Callback):
    "Another setting of the loss from the second epoch on"
    def before_train(self): self.learn.loss_func.func.label_smoothing = .1*min(self.epoch, 1)

def test_recorded_again_and_why():
    learn = image_learner(cbs=Smooths()).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(3)
    report = learn.xla_report()
    assert report.again == {'label_smoothing 0.0 -> 0.1': 2} and report.audits == {'training': 2+2+1, 'validation': 1+1+1}, report
    assert report.recordings.recordings.to_dict() == dict(training=2, validation=2)
    told = 'Recorded again (2 times): label_smoothing', 'Audits: 5 training'
    assert all(s in o for o in (repr(report), report._repr_html_()) for s in told)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert report.again and report.audits['training'] == 5, 'a report is that of its fit, whatever comes after'

def test_nothing_is_recorded_again_where_nothing_changes():
    "Nor to validate without a bar"
    learn = image_learner().to_xla()
    with learn.no_logging(): learn.fit(2)
    report = learn.xla_report()
    assert not report.again and report.recordings.recordings.tolist() == [1, 1] and 'again' not in repr(report)
    with learn.no_logging():
        learn.validate()
        learn.get_preds()
    report = learn.xla_report()
    assert 'ecorded again' not in str(report), report

class Branches(Callback):
    def after_loss(self):
        if self.training and self.iter == 2: self.learn.loss_grad = self.loss_grad*2
def test_paths_of_own_code():
    learn = image_learner(cbs=Branches()).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(3)
    report = learn.xla_report()
    assert report.recordings.loc['training', 'recordings'] == 2 and report.recordings.batch.unique().tolist() == ['paths of your code']
    assert len(report.again) == 1 and 'torch.Tensor.mul at test_report.py, line ' in first(report.again), report.again

class ReadsAfter(Callback):
    def after_batch(self): self.n = (self.loss*2).item()   # read after the step
class ReadsBefore(Callback):
    def before_batch(self): self.n = self.x.mean().cpu()   # read before the step

@pytest.mark.parametrize('cb', [ReadsAfter, ReadsBefore])
def test_a_value_read_around_the_step_is_told_with_its_line(cb):
    items = list(zip(torch.randn(64, 1), torch.randn(64, 1)))
    dls = DataLoaders.from_dsets(items[:48], items[48:], bs=4, num_workers=0)
    learn = Learner(dls, nn.Linear(1, 1), loss_func=nn.MSELoss(), cbs=cb()).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
    f = getattr(cb, 'after_batch', None) or cb.before_batch
    call = f"torch.Tensor.{'item' if cb is ReadsAfter else 'cpu'} at test_report.py, line {f.__code__.co_firstlineno}, in {cb.__name__}."
    (what,n), = learn.xla_report().reads.items()
    assert call in what and n >= 40 and f'{n} batches read a value around the step: {what}' in repr(learn.xla_report())

class Reads(AccumMetric):
    "A metric that reads in each batch, as one that combines others"
    def __init__(self): self.seen = []
    def reset(self): self.seen = []
    def accumulate(self, learn): self.seen.append(learn.pred.max().item())   # read by a metric
    @property
    def value(self): return max(self.seen)
    @property
    def name(self): return 'reads'

class Scale(nn.Module):
    "A layer of the user's, which is logged"
    def forward(self, x): return x*2

def test_a_metric_that_reads_is_told_with_its_line_and_no_view_is_taken_for_a_cause():
    items = list(zip(torch.randn(64, 3), torch.randn(64, 6)))
    dls = DataLoaders.from_dsets(items[:48], items[48:], bs=4, num_workers=0)
    learn = Learner(dls, nn.Sequential(nn.Linear(3, 6), Scale()), loss_func=nn.MSELoss(), metrics=Reads()).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
    report = learn.xla_report(causes=True)
    (what,n), = report.reads.items()
    line = Reads.accumulate.__code__.co_firstlineno
    assert f'torch.Tensor.item at test_report.py, line {line}, in Recorder.after_batch' in what and n >= 12
    assert set(report.watch.table.cause) <= {'transfer'}, report.watch.table.to_dict('records')

def test_batches_that_are_nearly_all_recorded_anew_are_steady_ones():
    "Else what each of them costs would be in no table"
    log = CostLog()
    for i in range(40): log.batch('training', f'batch {i}', recorded=True)
    assert log.n_steady('training') > 4   # enough for a mean
    log = CostLog()
    for i in range(40): log.batch('training', f'batch {i}', recorded=i in (0, 1, 2, 4, 8, 16, 32))
    assert log.n_steady('training') == 33
