"The same seeds on the CPU and on XLA: losses, metrics, records and weights"
import math
from functools import lru_cache
import numpy as np, pandas as pd, pytest
from fastai.vision.all import *
from fastai.tabular.all import *
from fastai.collab import *
from fastai_xla.all import *
from fastai_xla.transfer import fetch
from fastai_xla.cli import digits_path, digits_dls

@pytest.fixture(scope='module')
def digits(tmp_path_factory): return digits_path(tmp_path_factory.mktemp('digits'))

def convnet(digits, **kwargs):
    model = nn.Sequential(ConvLayer(1, 16), ConvLayer(16, 32, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(32, 10))
    return Learner(digits_dls(digits), model, loss_func=CrossEntropyLossFlat(),
                   metrics=[accuracy, F1Score(average='macro')], **kwargs)

def people():
    g = np.random.default_rng(0)
    n = 1600
    df = pd.DataFrame(dict(job=g.choice(['a','b','c','d'], n), town=g.choice(['x','y','z'], n),
                           age=g.normal(40, 10, n), pay=g.normal(0, 1, n)))
    df['rich'] = np.where(df.pay + (df.job == 'a') + .02*df.age + g.normal(0, .5, n) > 1., 'yes', 'no')
    return df

def tabular(_, **kwargs):
    dls = TabularDataLoaders.from_df(people(), procs=[Categorify, FillMissing, Normalize], cat_names=['job','town'],
                                     cont_names=['age','pay'], y_names='rich', valid_idx=list(range(320)), bs=64, num_workers=0)
    return tabular_learner(dls, layers=[50,20], metrics=accuracy, **kwargs)

def ratings(n=1600):
    g = np.random.default_rng(0)
    users,items = g.normal(size=(40,3)),g.normal(size=(60,3))
    u,i = g.integers(0, 40, n),g.integers(0, 60, n)
    return pd.DataFrame(dict(user=u, item=i, rating=np.clip(3 + (users[u]*items[i]).sum(1) + g.normal(0, .2, n), .5, 5)))

def collab(_, **kwargs):
    dls = CollabDataLoaders.from_df(ratings(), bs=64, num_workers=0, seed=1)
    return collab_learner(dls, n_factors=10, y_range=(0, 5.5), metrics=rmse, **kwargs)

def collab_nn(_, **kwargs):
    dls = CollabDataLoaders.from_df(ratings(), bs=64, num_workers=0, seed=1)
    return collab_learner(dls, use_nn=True, layers=[30], y_range=(0, 5.5), **kwargs)

class Weights(Callback):
    "The weights after 20 steps"
    run_valid,order = False,1100
    def after_batch(self):
        if self.train_iter == 20: self.seen = fetch({k: v.clone() for k,v in self.model.state_dict().items()})

def run(make, digits, xla, **kwargs):
    set_seed(7, reproducible=True)
    learn = make(digits, cbs=Weights(), **kwargs).remove_cb(ProgressCallback)
    if xla: learn.to_xla()
    learn.rows = []
    learn.logger = learn.rows.append
    learn.fit_one_cycle(2, 5e-3)
    return learn

cases = dict(convnet_sgd=(convnet, dict(opt_func=partial(SGD, mom=.9))), convnet_adam=(convnet, {}), tabular=(tabular, {}),
             collab=(collab, dict(wd=.1)), collab_nn=(collab_nn, {}))

@lru_cache
def runs(case, digits):
    "Both learners of a case, trained"
    make,kwargs = cases[case]
    return [run(make, digits, xla, **kwargs) for xla in (False, True)]

@pytest.mark.parametrize('case', cases)
def test_parity(case, digits):
    a,b = runs(case, digits)
    ra,rb = a.recorder,b.recorder
    for x,y in zip(ra.losses[:20], rb.losses[:20]): assert abs(x-y) <= 1e-4*abs(x)
    assert len(ra.losses) == len(rb.losses)
    assert all(type(x) is type(y) and x.device == y.device and x.shape == y.shape for x,y in zip(ra.losses, rb.losses))
    assert ra.lrs == rb.lrs and ra.iters == rb.iters and ra.metric_names == rb.metric_names
    assert [list(map(type, v)) for v in ra.values] == [list(map(type, v)) for v in rb.values]
    n = len(a.dls.valid_ds)
    for i,(x,y) in enumerate(zip(ra.values[-1], rb.values[-1])):
        error = math.sqrt(max(x*(1-x), 0.)/n) if i > 1 and x < 1 else .01*abs(x)   # one standard error of a rate, one percent of a loss
        assert abs(x-y) <= error + 1e-6, (ra.metric_names[i+1], x, y)
    for k,v in a.weights.seen.items():
        if v.numel(): assert (v.float()-b.weights.seen[k].float()).abs().max() <= 5e-3*v.float().abs().max() + 1e-7, k
    assert str(b.model.state_dict()['0.0.weight' if 'convnet' in case else next(iter(b.model.state_dict()))].device) == 'xla:0'

def test_eval_after_training(digits):
    "Validation uses the statistics that training has gathered: the losses are the CPU's"
    a,b = runs('convnet_sgd', digits)
    for x,y in zip(a.recorder.values, b.recorder.values): assert abs(x[1]-y[1]) <= 1e-4*abs(x[1])

def test_last_epoch_of_the_table(digits):
    "What the user sees is the same row"
    (_,*a,_),(_,*b,_) = (learn.rows[-1] for learn in runs('convnet_adam', digits))
    assert [type(o) for o in a] == [type(o) for o in b] and np.allclose(a, b, rtol=2e-2)
