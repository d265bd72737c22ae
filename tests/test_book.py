"""What the chapters of the fast.ai book do, in small: each story is told on the CPU and, with `.to_xla()` and nothing else, on XLA

Losses, metrics and weights agree; a steady batch is one execution without a compile or a transfer to the host."""
import random
from dataclasses import dataclass
from functools import partial
import pytest, torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.seeds import manual_seed
from fastai_xla.transfer import fetch
from common import convnet, image_dls, image_learner, params_of
from probe import *

def tell(make, story, on_xla):
    "A learner after its story"
    set_seed(1)
    learn = make()
    if on_xla:
        manual_seed(1)
        learn.add_cb(Probe()).to_xla()
    with learn.no_logging(), learn.no_bar():
        set_seed(2)
        learn.told = story(learn)
    return learn

def close(a, b, tol=1e-4):
    "Are two numbers, tensors, or lists of them the same to rounding?"
    if isinstance(a, (list, tuple, L)): return len(a) == len(b) and all(close(x, y, tol) for x,y in zip(a, b))
    if a is None or isinstance(a, str): return a == b
    a,b = (torch.as_tensor(fetch(o)).double() for o in (a, b))
    return a.shape == b.shape and bool(((a-b).abs() <= tol*b.abs().max().clamp(min=1e-2)).all())

def same(make, story=lambda l: l.fit_one_cycle(2, 1e-2), tol=1e-4):
    "The learner on XLA, once all that its story has left is what the CPU's has"
    cpu,xla = (tell(make, story, on_xla) for on_xla in (False, True))
    assert close(cpu.told, xla.told, tol), (cpu.told, xla.told)
    assert close(cpu.recorder.losses, xla.recorder.losses, tol)
    assert close(cpu.recorder.values, xla.recorder.values, tol), (cpu.recorder.values, xla.recorder.values)
    a,b = cpu.model.state_dict(),fetch(xla.model.state_dict())
    assert not (bad := [k for k in a if not close(a[k], b[k], 10*tol)]), bad
    return xla

def keeps(learn, executions=1, late=0, n=5):
    "Its steady batches keep the step contract; where state is made in the first step, there is a second kind of step"
    train,valid = (learn.probe.steady(training, late) for training in (True, False))
    assert len(train) >= n and not breaches(train, executions), breaches(train, executions)
    assert not breaches(valid), breaches(valid)

# Data

@pytest.fixture(scope='module')
def files(tmp_path_factory):
    "Digits in a folder for each kind, larger and of three colors"
    path,data = tmp_path_factory.mktemp('digits'),load_digits()
    for split,first,n in (('train', 0, 24), ('valid', 24, 8)):
        for label in range(4):
            (path/split/str(label)).mkdir(parents=True)
            for i,a in enumerate(data.images[data.target == label][first:first+n]):
                Image.fromarray((a*15).astype('uint8')).convert('RGB').resize((20, 18)).save(path/split/str(label)/f'{label}_{i}.png')
    return path

def colornet(out=4):
    return nn.Sequential(nn.Sequential(ConvLayer(3, 8, stride=2)),
                         nn.Sequential(ConvLayer(8, 8, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(8, out)))

def digits_dls(path, size=16, bs=8, **kwargs):
    block = DataBlock((ImageBlock, CategoryBlock), get_items=get_image_files,
                      splitter=GrandparentSplitter(), get_y=parent_label, item_tfms=Resize(size), **kwargs)
    return block.dataloaders(path, bs=bs, num_workers=0)

def digits_learner(path, dls_kwargs={}, **kwargs):
    return Learner(digits_dls(path, **dls_kwargs), colornet(), **(dict(metrics=accuracy, splitter=params_of) | kwargs))

# Pairs of images

class Pair(fastuple): pass

class DrawPair(Transform):
    "An image, another one of the same kind or not, and whether it is; fixed in validation"
    def __init__(self, files, valid):
        self.kinds = {k: [f for f in files if f.parent.name == k] for k in {f.parent.name for f in files}}
        self.fixed = {f: self.draw(f) for f in valid}
    def draw(self, f):
        same = random.random() < .5
        kind = f.parent.name if same else random.choice(sorted(k for k in self.kinds if k != f.parent.name))
        return random.choice(self.kinds[kind]),same
    def encodes(self, f):
        other,same = self.fixed.get(f) or self.draw(f)
        return Pair(PILImage.create(f), PILImage.create(other), same)

class Twin(Module):
    def __init__(self):
        self.body = nn.Sequential(ConvLayer(3, 8, stride=2), ConvLayer(8, 8, stride=2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(16, 2))
    def forward(self, a, b): return self.head(torch.cat([self.body(a), self.body(b)], 1))

def pairs(path):
    items = get_image_files(path).sorted()
    splits = GrandparentSplitter()(items)
    tls = TfmdLists(items, DrawPair(items, items[splits[1]]), splits=splits)
    dls = tls.dataloaders(bs=8, num_workers=0, after_item=[Resize(16), ToTensor],
                          after_batch=[IntToFloatTensor, Normalize.from_stats(*imagenet_stats, cuda=False)])
    return Learner(dls, Twin(), loss_func=lambda out, y: F.cross_entropy(out, y.long()),
                   splitter=lambda m: [params(m.body), params(m.head)], metrics=accuracy)

def test_pairs_of_images_by_discriminative_rates(files):
    def story(learn):
        learn.freeze()
        learn.fit_one_cycle(1, 3e-3)
        learn.unfreeze()
        learn.fit_one_cycle(2, slice(1e-4, 1e-3))
    keeps(same(lambda: pairs(files), story))

@dataclass
class Answer:
    logits:object
    hidden:object

class Answers(Module):
    "Gives its prediction in a container of the user's own"
    def __init__(self, kind): self.kind,self.body,self.last = kind,convnet()[0],nn.Linear(8, 4)
    def forward(self, x):
        hidden = self.body(x).mean((2,3))
        return self.kind(logits=self.last(hidden), hidden=hidden)

class Reads(Callback):
    "Sums what it finds in the prediction"
    def before_fit(self): self.total = 0.
    def after_batch(self): self.total += self.pred.logits.abs().mean().item() + self.pred.hidden.sum().item()

@pytest.mark.parametrize('kind', [Answer, AttrDict], ids=['dataclass', 'dict'])
def test_prediction_in_a_container_of_its_own(kind):
    def story(learn):
        learn.fit(2, 1e-2)
        return learn.reads.total
    same(lambda: Learner(image_dls(64, 32, 8), Answers(kind), loss_func=lambda out, y: F.cross_entropy(out.logits, y), cbs=Reads()), story)

# Optimizers of functions

def keeps_average(p, mom, average=None, **kwargs):
    return dict(average=(torch.zeros_like(p.grad.data) if average is None else average)*mom + p.grad.data)
def steps_by_average(p, lr, average, **kwargs): p.data.add_(average, alpha=-lr)
def keeps_squares(p, sqr_mom, squares=None, **kwargs):
    return dict(squares=(torch.zeros_like(p.grad.data) if squares is None else squares)*sqr_mom + (1-sqr_mom)*p.grad.data**2)
def steps_by_squares(p, lr, squares, eps, **kwargs): p.data.addcdiv_(p.grad, squares.sqrt().add_(eps), value=-lr)

@pytest.mark.parametrize('opt_func', [partial(Optimizer, cbs=[keeps_average, steps_by_average], mom=.9),
                                      partial(Optimizer, cbs=[keeps_squares, steps_by_squares], sqr_mom=.99, eps=1e-4)],
                         ids=['momentum', 'rms'])
def test_optimizer_of_functions(opt_func): keeps(same(lambda: image_learner(opt_func=opt_func), lambda l: l.fit_one_cycle(3, 1e-3)), late=1)

# Looking into a model by hooks

class Stored:
    "What a module has given, or the gradient of that"
    def __init__(self, m, backward=False):
        self.hook = m.register_full_backward_hook(self.backward) if backward else m.register_forward_hook(self.forward)
    def forward(self, m, i, o): self.stored = o.detach().clone()
    def backward(self, m, gi, go): self.stored = go[0].detach().clone()
    def __enter__(self): return self
    def __exit__(self, *args): self.hook.remove()

def maps(learn):
    "Where the model looks: by its last layer's weights, and by gradients"
    x,_ = learn.dls.valid.one_batch()
    body,last = learn.model[0],learn.model[1][-1]
    with Stored(body) as hook, torch.no_grad(): learn.model.eval()(x)
    cam = torch.einsum('ck,kij->cij', last.weight, hook.stored[0])
    with Stored(body, backward=True) as grads, Stored(body) as hook: learn.model.eval()(x)[0,1].backward()
    return [cam.detach().cpu(), (grads.stored[0].mean((1,2), keepdim=True)*hook.stored[0]).sum(0).cpu()]

def test_class_activation_maps_and_a_fit_afterwards():
    def story(learn):
        learn.fit(1, 1e-3)
        first = maps(learn)
        learn.fit(2, 1e-3)
        return first + maps(learn)
    keeps(same(image_learner, story))

def test_activation_stats_in_color():
    def story(learn):
        learn.fit(2, 1e-3)
        stats = learn.activation_stats
        stats.plot_layer_stats(0)
        stats.color_dim(-2)
        return [[o['mean'], o['std'], o['near_zero'], o['hist']] for layer in stats.stats for o in layer]
    keeps(same(lambda: image_learner(cbs=ActivationStats(with_hist=True)), story), late=1)

# Other targets

def test_points_within_a_range(tmp_path):
    "The middle of a bright spot, from a text file beside each image"
    g = torch.Generator().manual_seed(0)
    y,x = torch.meshgrid(torch.arange(18), torch.arange(24), indexing='ij')
    for i in range(64):
        cx,cy = (torch.rand(2, generator=g)*torch.tensor([24, 18])).tolist()
        Image.fromarray((255*torch.exp(-((x-cx)**2 + (y-cy)**2)/12)).byte().numpy()).convert('RGB').save(tmp_path/f'{i}.png')
        (tmp_path/f'{i}.txt').write_text(f'{cx} {cy}')
    def middle(f): return tensor([float(o) for o in f.with_suffix('.txt').read_text().split()])
    def make():
        block = DataBlock((ImageBlock, PointBlock), get_items=lambda p: get_image_files(p).sorted(), get_y=middle,
                          splitter=IndexSplitter(range(16)), batch_tfms=[Normalize.from_stats(*imagenet_stats, cuda=False)])
        return Learner(block.dataloaders(tmp_path, bs=8, num_workers=0),
                       nn.Sequential(colornet(out=2), SigmoidRange(-1, 1)), loss_func=MSELossFlat())
    def story(learn):
        learn.fit_one_cycle(2, 1e-2)
        learn.show_results(ds_idx=1, max_n=2)
    keeps(same(make, story))

def test_threshold_of_several_labels_changes_between_validations(files):
    def labels(f): return [['even', 'odd'][int(f.parent.name)%2], ['low', 'high'][f.parent.name > '1']]
    def make():
        block = DataBlock((ImageBlock, MultiCategoryBlock), get_items=get_image_files,
                          get_y=labels, splitter=GrandparentSplitter(), item_tfms=Resize(16))
        return Learner(block.dataloaders(files, bs=8, num_workers=0), colornet(), metrics=partial(accuracy_multi, thresh=.2))
    def story(learn):
        learn.fit(1, 1e-2)
        res = [learn.final_record]
        for thresh in (.1, .3, .99):
            learn.metrics = partial(accuracy_multi, thresh=thresh)
            res.append(learn.validate())
        preds,targs = learn.get_preds()
        learn.fit(2, 1e-2)
        return res + [[accuracy_multi(preds, targs, thresh=t, sigmoid=False) for t in torch.linspace(.05, .95, 5)]]
    keeps(same(make, story))

# Around the fit

def test_images_grow_between_fits(files):
    def story(learn):
        learn.fit_one_cycle(1, 3e-3)
        learn.dls = digits_dls(files, 24, batch_tfms=Normalize.from_stats(*imagenet_stats, cuda=False))
        learn.fine_tune(1, 1e-3)
        preds,targs = learn.tta(n=2)
        learn.fit(1, 1e-3)
        return preds, accuracy(preds, targs).item()
    keeps(same(lambda: digits_learner(files, dict(batch_tfms=Normalize.from_stats(*imagenet_stats, cuda=False))), story))

def reasons(learn): return ' '.join(learn.xla_report()._notes())

def test_mixed_images_with_smoothed_labels():
    keeps(same(lambda: image_learner(loss_func=LabelSmoothingCrossEntropy(), cbs=MixUp(.4))))

def test_presized_images(files):
    "The place of the crop is drawn on the host; whether it is flipped, on the device"
    batch_tfms = aug_transforms(size=16, min_scale=.75, max_rotate=0., max_zoom=1., max_warp=0., max_lighting=0.)
    keeps(tell(lambda: digits_learner(files, dict(size=20, batch_tfms=batch_tfms)), lambda l: l.fit(2, 1e-3), True))

class Watches(Callback):
    "Reads the loss as people do"
    def before_fit(self): self.seen = []
    def after_batch(self):
        if torch.isinf(self.loss) or torch.isnan(self.loss): raise CancelFitException
        self.seen.append(self.loss.item())

def test_loss_read_in_each_batch_costs_transfers_and_is_told():
    def story(learn):
        learn.fit(2, 1e-2)
        return learn.watches.seen
    learn = same(lambda: image_learner(cbs=Watches()), story)
    assert learn.xla_report().per_batch()['to host'] >= 1
    assert 'Which lines these come from' in reasons(learn)
