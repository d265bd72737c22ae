"""Learners that go from one number of devices to another: files, exports, predictions"""
import torch
from fastai.vision.all import load_learner
from test_devices import python
from test_devices_calls import head

train = head + """
set_seed(0)
learn = cases.images(path='{path}', model_dir='.').to_xla(devices='all', shard={shard!r})
with learn.no_bar(), learn.no_logging():
    learn.fit(1, 1e-3)
    learn.save('m{n}')
    with count_xla() as c: p,_ = learn.get_preds()
    q,_ = learn.tta(n=2)
    r = learn.predict(3)[2]
    s = learn.validate()
    learn.lr_find(num_it=10, show_plot=False)
learn.export('e{n}.pkl')
before = fetch([p.detach() for p in learn.model.parameters()])
learn.detach_xla()
print('compiles', c.compiles)
print('same', all(torch.equal(a, b) for a,b in zip(before, learn.model.parameters())))
torch.save([p, q, r, torch.tensor(list(s))], '{path}/p{n}.pt')
"""
load = head + """
learn = cases.images(path='{path}', model_dir='.').to_xla(devices='all', shard={shard!r})
learn.create_opt()
learn.load('m{of}')
learn.save('again')
with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
print(len(learn.recorder.losses))
"""

def flat(o, at=''):
    if isinstance(o, dict): return {k2: v2 for k,v in o.items() for k2,v2 in flat(v, f'{at}.{k}').items()}
    if isinstance(o, (list, tuple)): return {k2: v2 for k,v in enumerate(o) for k2,v2 in flat(v, f'{at}.{k}').items()}
    return {at: o}

def equal(a, b):
    a,b = flat(a),flat(b)
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k] for k,v in a.items())

def check_saved(path):
    def saved(name): return torch.load(path/f'{name}.pth', weights_only=False)
    for of,n,shard in ((1, 4, 'fsdp'), (4, 2, None)):
        python(['-c', load.format(path=path, of=of, n=n, shard=shard)], n)
        a,b = saved(f'm{of}'),saved('again')
        assert equal(a, b), (of, n)
        assert not any(isinstance(v, torch.Tensor) and v.device.type != 'cpu' for v in flat(b).values())
    assert not equal(saved('m1'), saved('m4'))   # bit for bit, these are two trainings

def check_exported(path):
    model = load_learner(path/'e4.pkl').model
    assert '0.0.0.weight' in model.state_dict() and {p.device.type for p in model.parameters()} == {'cpu'}

def check_predictions(path, outs):
    assert all('same True' in o for o in outs)
    assert [o.split('compiles ')[1][0] for o in outs][1] <= [o.split('compiles ')[1][0] for o in outs][0]
    for a,b in zip(*(torch.load(path/f'p{n}.pt') for n in (1, 4))): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

def test_files_exports_and_predictions_of_one_and_of_four_devices(tmp_path):
    "Of two trainings: files are loaded under other numbers of devices, an export in plain fastai; predictions are the same"
    outs = [python(['-c', train.format(path=tmp_path, n=n, shard=shard)], n) for n,shard in ((1, None), (4, 'fsdp'))]
    check_saved(tmp_path)
    check_exported(tmp_path)
    check_predictions(tmp_path, outs)

def test_demo():
    out = python(['-c', "from fastai_xla.cli import demo; demo(1, 64, 'all')"], 4)
    assert '(4 devices)' in out and 'Accuracy on 360 digits' in out and 'Each batch is split over 4 of 4 devices' in out, out[-2000:]
