"What recordings hold is let go with them, and they are made again, or stay, where they have to"
import gc, os, weakref
from pathlib import Path
import own_process, pytest
from common import *
from fastai_xla.all import *
from fastai_xla.runtime import sync
from changes import *
from changes_around import *

pytestmark = pytest.mark.usefixtures('recorded')

# What a recording holds

def n_tensors():
    "XLA tensors that are alive"
    import torch_xla.debug.metrics as met
    gc.collect()
    sync()
    return met.counter_value('CreateXlaTensor') - met.counter_value('DestroyXlaTensor')

def another_callback(l):
    if any(isinstance(cb, Tensors) for cb in l.cbs): l.remove_cb(Tensors)
    l.add_cb(Tensors())
grows = dict(fit=noop, optimizer=new_opt, model=new_model, load=saves, callback=another_callback,
             lr_find=finds, loss=loss(lambda: CrossEntropyLossFlat(weight=torch.ones(4))))

@pytest.mark.parametrize('name', grows)
def test_no_growth(name):
    "What has been replaced is let go, with all recordings of it"
    live = []
    def story(l):
        for _ in range(4):
            grows[name](l)
            l.fit(1, 1e-2)
            live.append(n_tensors())
    run(learner, story, True)
    assert live[-1] == live[-2] == live[-3], live

def test_state_is_freed():
    "The optimizer's state goes with the optimizer"
    def story(l):
        l.fit(1, 1e-2)
        p = last(l).weight
        was = [weakref.ref(l.opt.state[p]['grad_avg']), weakref.ref(l.opt)]
        l.create_opt()
        l.fit(1, 1e-2)
        gc.collect()
        assert not any(w() is not None for w in was)
    run(learner, story, True)

@pytest.mark.parametrize('frees', [True, False])
def test_learners_of_a_loop_go(frees, monkeypatch):
    "One for each fold: the last one is there yet when the next one comes. Without a look they stay, as all objects are old after a trace"
    if not frees: monkeypatch.setattr('fastai_xla.learner.free_others', noop)
    models = []
    for _ in range(4):
        learn = image_learner()
        models.append(weakref.ref(learn.model))
        learn.to_xla()
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert (sum(m() is not None for m in models) == 1) == frees

def test_small_cache(tmp_path):
    "A recording whose program torch_xla has dropped is made again"
    code = """
import test_replay_changes as t
from fastai_xla.replay import Replay
Replay.log_of = lambda self: None
make,story = next(c[2:] for c in t.cases if c[:2] == ('cb', 'resizes'))
t.compare(make, story)"""
    res = own_process.run(['-c', code], tmp_path, Path(__file__).parent, os.environ | dict(XLA_COMPILATION_CACHE_SIZE='2'))
    assert not res.returncode, res.stderr[-2000:]

class Averaged(Callback):
    "Validates with an average of the weights, as callbacks do that put another model there for it"
    def before_fit(self): self.mean = deepcopy(self.learn.model)
    def after_train(self):
        with torch.no_grad():
            for a,p in zip(self.mean.parameters(), self.learn.model.parameters()): a.lerp_(p, .5)
    def before_validate(self): self.own,self.learn.model = self.learn.model,self.mean
    def after_validate(self): self.learn.model = self.own

def test_a_model_that_is_there_for_validation_alone_drops_no_recordings():
    def fitted(replay):
        torch.manual_seed(0)
        learn = image_learner(dls=image_dls(shuffle=False), cbs=Averaged()).to_xla(replay=replay)
        with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
        return learn
    right,learn = fitted(False),fitted('auto')
    assert tensor(learn.recorder.losses).equal(tensor(right.recorder.losses)) and learn.recorder.values == right.recorder.values
    report = learn.xla_report()
    assert report.recordings.groupby('phase').recordings.sum().to_dict() == {'training': 1, 'validation': 1}
    assert not report.plain and not report.again and report.audits['training'] == 4   # its batches 2, 4 and 8, and where epochs begin
