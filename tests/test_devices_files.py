"""Learners that go from one number of devices to another: files, exports, predictions"""
import torch
from test_devices import python
from test_devices_calls import head

train = head + """
set_seed(0)
learn = cases.images(path='{path}', model_dir='.').to_xla(devices='all', shard={shard!r})
with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
learn.save('m{n}')
learn.export('e{n}.pkl')
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

def test_save_and_load_across_devices(tmp_path):
    for n,shard in ((1, None), (4, 'fsdp')): python(['-c', train.format(path=tmp_path, n=n, shard=shard)], n)
    for of,n,shard in ((1, 4, 'fsdp'), (4, 1, None), (4, 2, None)):
        python(['-c', load.format(path=tmp_path, of=of, n=n, shard=shard)], n)
        a,b = (torch.load(tmp_path/f'{f}.pth', weights_only=False) for f in (f'm{of}', 'again'))
        assert equal(a, b), (of, n)
        assert not any(isinstance(v, torch.Tensor) and v.device.type != 'cpu' for v in flat(b).values())
    assert not equal(*(torch.load(tmp_path/f'm{n}.pth', weights_only=False) for n in (1, 4)))   # bit for bit, these are two trainings

def test_export_loads_in_plain_fastai(tmp_path):
    python(['-c', train.format(path=tmp_path, n=4, shard='fsdp')], 4)
    out = python(['-c', f"""
import sys
from fastai.vision.all import *
from fastai_xla import cases
learn = load_learner('{tmp_path}/e4.pkl')
print(list(learn.model.state_dict())[:1], next(learn.model.parameters()).device)"""], 1)
    assert "0.0.0.weight" in out and 'cpu' in out

predict = head + """
set_seed(0)
learn = cases.images().to_xla(devices='all', shard={shard!r})
with learn.no_bar(), learn.no_logging():
    learn.fit(1, 1e-3)
    with count_xla() as c: p,_ = learn.get_preds()
    q,_ = learn.tta(n=2)
    r = learn.predict(3)[2]
    s = learn.validate()
    learn.lr_find(num_it=10, show_plot=False)
    before = fetch([p.detach() for p in learn.model.parameters()])
    learn.detach_xla()
print('compiles', c.compiles)
print('same', all(torch.equal(a, b) for a,b in zip(before, learn.model.parameters())))
torch.save([p, q, r, torch.tensor(list(s))], '{file}')
"""

def test_predictions(tmp_path):
    outs,found = [],[]
    for n,shard in ((1, None), (4, 'fsdp')):
        file = tmp_path/f'{n}.pt'
        outs.append(python(['-c', predict.format(shard=shard, file=file)], n))
        found.append(torch.load(file))
    assert all('same True' in o for o in outs)
    assert [o.split('compiles ')[1][0] for o in outs][1] <= [o.split('compiles ')[1][0] for o in outs][0]
    for a,b in zip(*found): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

def test_demo():
    out = python(['-c', "from fastai_xla.cli import demo; demo(1, 64, 'all')"], 4)
    assert '(4 devices)' in out and 'Accuracy on 360 digits' in out and 'Each batch is split over 4 of 4 devices' in out, out[-2000:]
