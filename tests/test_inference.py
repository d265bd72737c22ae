"""Predicting, validating and interpreting on XLA: the results of the CPU, few graphs, few transfers

Then kinds of models and data beside vision."""
import pytest, torch
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.cli import digits_path, digits_dls, digits_model
from common import image_dls, image_learner
from probe import *
import test_parity as parity

@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    "The same trained learner, on the CPU and on XLA"
    path = digits_path(tmp_path_factory.mktemp('digits'))
    def make():
        return Learner(digits_dls(path), digits_model(), loss_func=CrossEntropyLossFlat(),
                       metrics=accuracy, path=path).remove_cb(ProgressCallback)
    set_seed(1)
    cpu,xla = make(),make()
    with cpu.no_logging(): cpu.fit_one_cycle(2, 1e-2)
    cpu.save('trained')
    return cpu,xla.to_xla().load('trained')

def close(a, b): return all((x.float()-y.float()).abs().max() < 1e-4 for x,y in zip(a, b) if isinstance(x, Tensor))

def test_get_preds(pair, without_audits):
    cpu,xla = pair
    for _ in range(2): xla.get_preds()   # which record the step
    with count_xla() as c: b = xla.get_preds()
    assert close(cpu.get_preds(), b) and c.to_host == 2 and c.executions <= len(xla.dls.valid) + 1    # predictions, metrics
    args = dict(with_input=True, with_loss=True, with_decoded=True)
    a,b = cpu.get_preds(**args),xla.get_preds(**args)
    assert len(a) == len(b) == 5 and close(a, b) and [type(x) for x in a] == [type(x) for x in b]
    assert close(cpu.get_preds(ds_idx=0)[:1], xla.get_preds(ds_idx=0)[:1])

def test_second_call_compiles_nothing(pair):
    _,xla = pair
    xla.get_preds()
    with count_xla() as c: xla.get_preds()
    assert c.compiles == 0 and c.executions == len(xla.dls.valid)

def test_predict_and_test_dl(pair):
    cpu,xla = pair
    files = get_image_files(cpu.path/'valid')[:5]
    for f in files[:2]:
        (a,i,p),(b,j,q) = cpu.predict(f),xla.predict(f)
        assert a == b and i == j and close([p], [q]) and type(p) is type(q)
    assert close(cpu.get_preds(dl=cpu.dls.test_dl(files))[:1], xla.get_preds(dl=xla.dls.test_dl(files))[:1])

def test_items_without_labels_after_a_fit(tmp_path):
    "Their batches have no loss; that of the fit is none of the step's"
    images = [(o,) for o in torch.randn(6*16, 1, 8, 8)]
    def left(xla):
        set_seed(0)
        learn = image_learner(image_dls(shuffle=False)).remove_cb(ProgressCallback)
        if xla: learn.to_xla()
        with learn.no_logging(): learn.fit(1)
        return learn,learn.get_preds(dl=learn.dls.valid.new(images))[0]
    (_,a),(learn,b) = left(False),left(True)
    assert close([a], [b])
    report = learn.xla_report()
    assert not report.plain and report.per_batch('validation')['executions'] == 1, report.plain

def test_validate(pair):
    cpu,xla = pair
    a,b = cpu.validate(),xla.validate()
    assert [type(x) for x in a] == [type(x) for x in b] and all(abs(x-y) < 1e-4 for x,y in zip(a, b))

def test_within_inference_mode(pair):
    "In which torch_xla makes no view: a learner leaves it meanwhile"
    cpu,xla = pair
    file = get_image_files(cpu.path/'valid')[0]
    with torch.inference_mode():
        for f in (lambda l: list(map(tensor, l.validate())), Learner.get_preds, lambda l: l.predict(file)[1:], lambda l: l.tta(n=2)):
            assert close(f(cpu), f(xla)) and torch.is_inference_mode_enabled()
    assert not any(t.is_inference() for t in xla.model.state_dict(keep_vars=True).values())   # which could not be trained

def test_tta(pair):
    cpu,xla = pair
    a,b = cpu.tta(n=2),xla.tta(n=2)
    assert close(a, b)

def test_show_results_and_summary(pair, capsys):
    cpu,xla = pair
    xla.show_results(max_n=4)
    assert repr(xla.summary()) == repr(cpu.summary())

def test_interpretation(pair):
    cpu,xla = pair
    a,b = ClassificationInterpretation.from_learner(cpu),ClassificationInterpretation.from_learner(xla)
    assert (a.confusion_matrix() == b.confusion_matrix()).all()
    (la,ia),(lb,ib) = a.top_losses(5),b.top_losses(5)
    assert close([la], [lb]) and list(ia) == list(ib)
    b.plot_top_losses(4)
    b.plot_confusion_matrix()

def test_load_learner_to_xla(pair):
    cpu,xla = pair
    xla.export('e.pkl')
    back = load_learner(xla.path/'e.pkl').remove_cb(ProgressCallback).to_xla()
    f = get_image_files(cpu.path/'valid')[3]
    assert close([cpu.predict(f)[2]], [back.predict(f)[2]])
    assert next(back.model.parameters()).device.type == 'xla'

def test_max_held(pair, monkeypatch, without_audits):
    "Many predictions do not gather on the device"
    import fastai_xla.compat.core as core
    cpu,xla = pair
    monkeypatch.setattr(core, 'max_held', 1)
    for _ in range(2): xla.get_preds()   # which record the step
    with count_xla() as c: b = xla.get_preds()
    assert c.to_host == len(xla.dls.valid) + 1 and close(cpu.get_preds(), b)

def torch_dls():
    x,y = torch.randn(192, 1, 8, 8),torch.randint(4, (192,))
    loader = lambda ds: torch.utils.data.DataLoader(ds, batch_size=16)
    return DataLoaders(loader(torch.utils.data.TensorDataset(x[:128], y[:128])), loader(torch.utils.data.TensorDataset(x[128:], y[128:])))

def workers_dls():
    dls = image_dls()
    return DataLoaders(*(dl.new(num_workers=2) for dl in dls.loaders))

kinds = dict(
    torch_dataloaders=lambda: Learner(torch_dls(), nn.Sequential(nn.Flatten(), nn.Linear(64, 4)),
                                      loss_func=CrossEntropyLossFlat(), metrics=accuracy),
    workers=lambda: image_learner(workers_dls()),
    collab=lambda: parity.collab(None))   # more in test_contract.py

@pytest.mark.parametrize('kind', kinds)
def test_contract_of_kinds(kind):
    learn = kinds[kind]().remove_cb(ProgressCallback).add_cb(Probe()).to_xla()
    with learn.no_logging(): learn.fit_one_cycle(2, 1e-3)
    train,valid = learn.probe.steady(True),learn.probe.steady(False)
    assert len(train) >= 10 and not breaches(train), breaches(train)
    assert valid and not breaches(valid), breaches(valid)
