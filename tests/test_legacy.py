"The examples of fastai_xla_extensions 0.0.12's README, with only the import changed"
import warnings
import matplotlib.pyplot as plt, pytest, torch
from PIL import Image
from sklearn.datasets import load_digits
from fastai.vision.all import *
from fastai.test_utils import synth_learner
from fastai_xla.legacy import *
from fastai_xla import legacy
from fastai_xla.runtime import is_xla

@pytest.fixture(scope='module')
def mnist(tmp_path_factory):
    "In the place of MNIST_TINY: some threes and sevens"
    path,data = tmp_path_factory.mktemp('mnist_tiny'),load_digits()
    for label in (3, 7):
        images = data.images[data.target == label]
        for i,img in enumerate(images[:40]):
            dest = path/('valid' if i < 8 else 'train')/str(label)/f'{i}.png'
            dest.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((img*15.9).astype(np.uint8)).convert('RGB').resize((28, 28)).save(dest)
    return path

def small(pretrained=False, weights=None):
    "In the place of resnet18, whose weights come over the network"
    return nn.Sequential(ConvLayer(3, 8, stride=2), ConvLayer(8, 16, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(16, 2))

@pytest.fixture
def offline(monkeypatch, mnist):
    for name,here in dict(untar_data=lambda url: mnist, resnet18=small).items(): monkeypatch.setitem(globals(), name, here)
    monkeypatch.setattr(legacy, '_told', set())
    monkeypatch.setattr(defaults, 'cpus', 0)   # no processes that load a few small pictures
    yield
    plt.close('all')

def block(batch_tfms):
    return DataBlock(blocks=(ImageBlock, CategoryBlock), get_items=get_image_files, splitter=GrandparentSplitter(),
                     get_y=parent_label, item_tfms=Resize(28), batch_tfms=batch_tfms)

@pytest.mark.filterwarnings('ignore:.cnn_learner. has been renamed')
def test_several_cores(offline):
    set_seed(0)   # in 2 of 150 the first batch's loss is so low that fastai takes those after it for a divergence, on the CPU too
    path = untar_data(URLs.MNIST_TINY)
    datablock = block([Normalize.from_stats(*imagenet_stats)])
    datablock.summary(path)
    dls = datablock.dataloaders(path, bs=8)
    dls.show_batch()
    learner = cnn_learner(dls, resnet18, metrics=accuracy, concat_pool=False)
    learner.summary()
    with pytest.warns(FutureWarning, match='learn.xla_lr_find.*Now: `learn.to_xla') as told, learner.no_bar():
        found = learner.xla_lr_find()
        learner.xla_fit_one_cycle(5, lr_max=slice(1e-4, 0.02))
        learner.xla_fit_one_cycle(5, lr_max=slice(7e-4, 1e-3))
    assert found._fields == ('lr_min', 'lr_steep') and all(0 < o < 10 for o in found)
    assert one_param(learner.model).device == torch.device('cpu')
    learner.recorder.plot_loss()
    said = [str(w.message) for w in told if w.category is FutureWarning]
    assert len(said) == 2 and "`learn.xla_fit_one_cycle` is of fastai_xla_extensions. Now: `learn.to_xla()` once, then" in said[1]
    assert len(learner.recorder.losses) == 5*8 and learner.recorder.values[-1][-1] > .5
    cost = learner.xla_report().per_batch()
    assert (cost['executions'], cost['compiles'], cost['to host']) == (1, 0, 0)

@pytest.mark.filterwarnings('ignore:.cnn_learner. has been renamed', 'ignore:Random crops without a size', 'ignore:.*three shapes')
def test_single_core(offline, recwarn):
    path = untar_data(URLs.MNIST_TINY)
    set_seed(6)   # each size of a random crop is compiled, and by this the crops of the eight batches have two
    dls = block(aug_transforms(do_flip=False, min_scale=0.8)).dataloaders(path)
    learner = cnn_learner(dls, resnet18, metrics=accuracy)
    assert learner.to_xla() is learner
    with learner.no_bar():
        learner.lr_find(num_it=6)   # fewer steps than there
        learner.fit_one_cycle(1, lr_max=slice(1e-4, 0.02))
        learner.fit_one_cycle(1, slice(7e-4, 1e-3))
    assert is_xla(one_param(learner.model))
    learner.recorder.plot_loss()
    assert not [w for w in recwarn if w.category is FutureWarning]

# Names

def test_every_name_has_an_answer():
    names = legacy_names()
    assert len(names) == 110 and names.index.is_unique and names.now.str.len().min() > 5
    here = [n for n in names.index if names.now[n].startswith('here')]
    for n in here: assert hasattr(Learner, n.removeprefix('Learner.')) or hasattr(legacy, n), n
    other = ('XLAOptCallback', 'to_list')   # ours; fastcore's
    gone = [n for n in names.index if n not in (*here, *other) and n.isidentifier()]
    for n in gone:
        with pytest.raises(ImportError, match=f'`{n}` of fastai_xla_extensions.*Now: '): getattr(legacy, n)
    assert not hasattr(legacy, 'nothing_of_the_kind')

def test_callbacks_of_one_process(monkeypatch):
    "Are heard in the fits that have another name, and in no other"
    monkeypatch.setattr(legacy, '_told', set())
    class Heard(Callback):
        n = 0
        def after_batch(self): self.n += 1
    learn,cb = synth_learner(n_trn=4, n_val=1).remove_cb(ProgressCallback),Heard()
    with pytest.warns(FutureWarning, match='learn.add_cb'): learn.add_master_cb(cb)
    with learn.no_logging():
        learn.fit(1)
        assert cb.n == 0
        with pytest.warns(FutureWarning, match='learn.fit'): learn.xla_fit(1, num_cores=1, start_method='spawn')
        assert cb.n == 5 and learn.grab_master_cbs(Heard)[0] is cb
        assert len(learn.remove_master_cb(Heard).master_cbs) == 0

def test_learner_that_is_there_stays_there():
    learn = synth_learner(n_trn=4, n_val=1).remove_cb(ProgressCallback).to_xla()
    with learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore', FutureWarning)
        learn.xla_fit(1)
    assert is_xla(one_param(learn.model))
