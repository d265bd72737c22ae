"Self-supervised pretraining by BYOL: two views of an image, a target network that follows slowly; then fine-tuned on few labels"
from copy import deepcopy
from sklearn.datasets import load_digits
from fastai.vision.all import *
from fastai_xla.all import *

def encoder():
    return nn.Sequential(ConvLayer(1, 16), ConvLayer(16, 32, stride=2), ConvLayer(32, 64, stride=2), nn.AdaptiveAvgPool2d(1), Flatten())
def mlp(ni, nh, nf): return nn.Sequential(nn.Linear(ni, nh), nn.BatchNorm1d(nh), nn.ReLU(inplace=True), nn.Linear(nh, nf))

class BYOLModel(Module):
    def __init__(self, encoder, projector, predictor): self.encoder,self.projector,self.predictor = encoder,projector,predictor
    def forward(self, v1, v2): return tuple(self.predictor(self.projector(self.encoder(v))) for v in (v1, v2))

def views():
    "Noise, brightness and small shifts, on the whole batch"
    def shift(x):
        dx,dy = (torch.randint(-1, 2, (len(x), 1), device=x.device) for _ in range(2))
        r = torch.arange(x.shape[-1], device=x.device)[None]
        rows,cols = (r+dy).clamp(0, x.shape[-1]-1),(r+dx).clamp(0, x.shape[-1]-1)
        x = x.gather(2, rows[:,None,:,None].expand(x.shape))
        return x.gather(3, cols[:,None,None].expand(x.shape))
    def light(x): return x*(.7+.6*torch.rand(len(x), 1, 1, 1, device=x.device))
    def noise(x): return x + .15*torch.randn_like(x)
    return Pipeline([shift, light, noise])

class BYOL(Callback):
    order,run_valid = 9,True
    def __init__(self, aug1, aug2, m=.99): store_attr()
    def before_fit(self):
        self.target = deepcopy(self.learn.model).to(self.dls.device)
        for p in self.target.parameters(): p.requires_grad = False
        self.learn.loss_func = self.lf
    def before_train(self): self.target.train()
    def before_validate(self): self.target.eval()
    def before_batch(self):
        v1,v2 = self.aug1(self.x),self.aug2(self.x.clone())
        self.learn.xb = v1,v2
        with torch.no_grad(): self.learn.yb = tuple(self.target.projector(self.target.encoder(v)) for v in (v1, v2))
    def lf(self, pred, *yb):
        def far(x, y): return 2 - 2*(F.normalize(x)*F.normalize(y)).sum(-1)
        return (far(pred[0], yb[1]) + far(pred[1], yb[0])).mean()
    @torch.no_grad()
    def after_step(self):
        for p,k in zip(self.learn.model.parameters(), self.target.parameters()): k.data = k.data*self.m + p.data*(1.-self.m)

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (600, 3) if small else (1500, 6)
    digits = load_digits()
    idxs = np.random.RandomState(seed).permutation(1797)
    x,y = TensorImageBW(torch.tensor(digits.images[idxs], dtype=torch.float)[:,None]/16),TensorCategory(digits.target[idxs])
    dsets = Datasets(range(n), [[x.__getitem__], [y.__getitem__]], splits=RandomSplitter(.1, seed=seed)(range(n)))
    dls = dsets.dataloaders(bs=64, num_workers=0)
    model = BYOLModel(encoder(), mlp(64, 64, 32), mlp(32, 64, 32))
    start = [p.detach().clone() for p in model.encoder.parameters()]
    learn = Learner(dls, model, loss_func=noop, cbs=[BYOL(views(), views())], opt_func=ranger)
    if xla: learn.to_xla()
    learn.fit_flat_cos(epochs, 5e-3)
    losses = [float(l) for l in learn.recorder.losses]
    moved = sum(float((a.cpu()-b).abs().mean()) for a,b in zip(learn.byol.target.encoder.parameters(), start))

    few = list(range(100)),list(range(1500, 1797))
    dls = Datasets(range(1797), [[x.__getitem__], [y.__getitem__]], splits=few).dataloaders(bs=25, val_bs=99, num_workers=0)
    clas = Learner(dls, nn.Sequential(model.encoder, nn.Linear(64, 10)), loss_func=CrossEntropyLossFlat(), metrics=accuracy,
        splitter=lambda m: L(m[0], m[1]).map(params))
    if xla: clas.to_xla()
    clas.freeze()
    clas.fit(3 if small else 10, 5e-2)
    clas.unfreeze()
    clas.fit_one_cycle(3 if small else 5, slice(1e-3, 1e-2))
    losses += [float(l) for l in clas.recorder.losses]
    return dict(metric=float(clas.recorder.values[-1][2]), moved=moved, losses=losses, learn=learn, others=[clas])
