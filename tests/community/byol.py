"Self-supervised pretraining by BYOL: two views of an image, a target network that follows slowly; then fine-tuned on few labels"
from copy import deepcopy
from sklearn.datasets import load_digits
from fastai.vision.all import *
from fastai_xla.all import *

def conv_features():
    return nn.Sequential(ConvLayer(1, 16), ConvLayer(16, 32, stride=2), ConvLayer(32, 64, stride=2), nn.AdaptiveAvgPool2d(1), Flatten())

def head(ni, nf): return nn.Sequential(LinBnDrop(ni, 64, act=nn.ReLU(), lin_first=True), nn.Linear(64, nf))

def moved(x, axis):
    "Each image by a pixel, or not, along an axis"
    size,steps = x.shape[axis],torch.randint(-1, 2, (len(x), 1), device=x.device)
    at = (torch.arange(size, device=x.device) + steps).clamp(0, size-1)
    at = at[:,None,:,None] if axis == 2 else at[:,None,None]
    return x.gather(axis, at.expand_as(x))

def random_view(x):
    "Moved, brighter or darker, noisy"
    x = moved(moved(x, 2), 3)
    gain = torch.empty(len(x), 1, 1, 1, device=x.device).uniform_(.7, 1.3)
    return x*gain + .15*torch.randn_like(x)

def cosine_distance(pred, target): return 2 - 2*F.cosine_similarity(pred, target).mean()

class Bootstrap(Callback):
    "The online network predicts what its slow copy, which has no predictor, makes of the other view"
    run_valid = True
    def __init__(self, keep=.9): self.keep = keep
    def before_fit(self): self.slow = deepcopy(self.model[:2]).requires_grad_(False)
    def before_batch(self):
        a,b = random_view(self.x),random_view(self.x)
        self.slow.train(self.training)
        self.learn.xb = (torch.cat([a, b]),)
        with torch.no_grad(): self.learn.yb = (self.slow(torch.cat([b, a])),)
    def after_step(self):
        for slow,fast in zip(self.slow.parameters(), self.model.parameters()): slow.data = torch.lerp(fast.data, slow.data, self.keep)

@torch.no_grad()
def spread(learn):
    "Of the slow network's directions: 0 where all images have one, 1 where they point everywhere"
    x,_ = learn.dls.valid.one_batch()
    z = F.normalize(learn.bootstrap.slow.eval()(x))
    return float(z.var(0).sum().cpu())

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (600, 2) if small else (1500, 6)
    digits = load_digits()
    idxs = np.random.RandomState(seed).permutation(1797)
    x,y = TensorImageBW(torch.tensor(digits.images[idxs], dtype=torch.float)[:,None]/16),TensorCategory(digits.target[idxs])
    def loaders(splits, **kwargs):
        dsets = Datasets(range(1797), [[x.__getitem__], [y.__getitem__]], splits=splits)
        return dsets.dataloaders(num_workers=0, **kwargs)
    dls = loaders(RandomSplitter(.1, seed=seed)(range(n)), bs=32)
    online = nn.Sequential(conv_features(), head(64, 32), head(32, 32))
    start = params(online[0])[0].detach().clone()
    learn = Learner(dls, online, loss_func=cosine_distance, cbs=Bootstrap)
    if xla: learn.to_xla()
    learn.fit_flat_cos(epochs, 1e-2)
    losses = [learn.recorder.losses]
    step = float((params(learn.bootstrap.slow)[0].cpu()-start).abs().mean())

    dls = loaders((range(100), range(1500, 1797)), bs=20, val_bs=99)
    clas = Learner(dls, nn.Sequential(online[0], nn.Linear(64, 10)), loss_func=CrossEntropyLossFlat(), metrics=accuracy,
        splitter=lambda m: L(m[0], m[1]).map(params))
    if xla: clas.to_xla()
    clas.freeze()
    clas.fit(2 if small else 10, 5e-2)
    losses.append(clas.recorder.losses)
    clas.unfreeze()
    clas.fit_one_cycle(2 if small else 5, slice(2e-3, 2e-2))
    losses.append(clas.recorder.losses)
    final = float(clas.recorder.values[-1][2])
    return dict(metric=final, spread=spread(learn), moved=step, losses=losses, learn=learn, others=[clas])
