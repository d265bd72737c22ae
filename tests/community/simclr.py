"Contrastive pretraining by SimCLR, judged by nearest neighbours of the embeddings"
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from fastai.vision.all import *
from fastai_xla.all import *
from .byol import encoder, mlp, views

class SimCLRModel(Module):
    def __init__(self, encoder, projector): self.encoder,self.projector = encoder,projector
    def forward(self, x): return self.projector(self.encoder(x))

class SimCLR(Callback):
    order,run_valid = 9,True
    def __init__(self, aug, temp=.2): store_attr()
    def before_fit(self): self.learn.loss_func = self.lf
    def before_batch(self):
        self.learn.xb = (torch.cat([self.aug(self.x), self.aug(self.x)]),)
        n = len(self.learn.xb[0])
        self.learn.yb = (torch.arange(n, device=self.dls.device).roll(n//2),)
    def without_diagonal(self, x): return x[~torch.eye(len(x)).bool()].reshape(len(x), len(x)-1)
    def lf(self, pred, *yb):
        z,targ = F.normalize(pred, dim=1),yb[0]
        sim = self.without_diagonal(z @ z.T)/self.temp
        targ = self.without_diagonal(torch.eye(len(targ), device=self.dls.device)[targ]).nonzero()[:,-1]
        return F.cross_entropy(sim, targ)

@torch.no_grad()
def embed(learn, dl):
    learn.model.eval()
    zs,ys = zip(*[(learn.model.encoder(x).cpu(), y.cpu()) for x,y in dl])
    return torch.cat(zs).numpy(),torch.cat(ys).numpy()

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (600, 2) if small else (1500, 5)
    digits = load_digits()
    idxs = np.random.RandomState(seed).permutation(1797)[:n]
    x,y = TensorImageBW(torch.tensor(digits.images[idxs], dtype=torch.float)[:,None]/16),TensorCategory(digits.target[idxs])
    dsets = Datasets(range(n), [[x.__getitem__], [y.__getitem__]], splits=RandomSplitter(.2, seed=seed)(range(n)))
    dls = dsets.dataloaders(bs=48, num_workers=0, drop_last=True)
    learn = Learner(dls, SimCLRModel(encoder(), mlp(64, 64, 32)), loss_func=noop, cbs=[SimCLR(views())])
    if xla: learn.to_xla()
    learn.fit_one_cycle(epochs, 1e-2)
    z,t = embed(learn, learn.dls.train.new(shuffle=False, drop_last=False))
    zv,tv = embed(learn, learn.dls.valid.new(drop_last=False))
    score = KNeighborsClassifier(5).fit(z, t).score(zv, tv)
    return dict(metric=score, losses=[float(l) for l in learn.recorder.losses], learn=learn)
