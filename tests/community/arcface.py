"Metric learning: an ArcFace head whose margin grows, a memory bank of embeddings with a pointer, retrieval by nearest neighbours"
from sklearn.datasets import load_digits
from fastai.vision.all import *
from fastai_xla.all import *

class ArcFace(Module):
    "Cosines to the class centres"
    def __init__(self, nf, nc):
        self.weight = nn.Parameter(torch.empty(nc, nf))
        nn.init.xavier_uniform_(self.weight)
    def forward(self, x): return F.linear(F.normalize(x), F.normalize(self.weight))

class Net(Module):
    def __init__(self, nf=16):
        self.body = nn.Sequential(ConvLayer(1, 16), ConvLayer(16, 32, stride=2), nn.AdaptiveAvgPool2d(2), Flatten(),
            nn.Linear(128, nf), nn.BatchNorm1d(nf))
        self.head = ArcFace(nf, 10)
    def forward(self, x):
        self.emb = self.body(x)
        return self.head(self.emb)

class ArcFaceLoss(Module):
    "The margin is added to the angle of the true class"
    def __init__(self, s=10., m=.1): self.s,self.m = s,m
    def forward(self, cosine, targ):
        targ = targ.long()
        sine = torch.sqrt((1-cosine**2).clamp(1e-6, 1))
        phi = cosine*math.cos(self.m) - sine*math.sin(self.m)
        phi = torch.where(cosine > math.cos(math.pi-self.m), phi, cosine-math.sin(math.pi-self.m)*self.m)
        hot = torch.zeros_like(cosine).scatter_(1, targ.view(-1, 1), 1)
        return F.cross_entropy((hot*phi + (1-hot)*cosine)*self.s, targ)

class GrowMargin(Callback):
    "From an easy problem to a hard one"
    def __init__(self, to=.3): self.to = to
    def before_epoch(self): self.learn.loss_func.m = .1 + (self.to-.1)*self.epoch/max(1, self.n_epoch-1)

class MemoryBank(Callback):
    "The last embeddings and their labels, against which each batch is compared"
    run_valid = False
    def __init__(self, size=256, weight=.2, temp=.2): store_attr()
    def before_fit(self):
        nf = self.model.head.weight.shape[1]
        self.bank,self.labels = F.normalize(torch.randn(self.size, nf)).to(self.dls.device),torch.full((self.size,), -1).to(self.dls.device)
        self.ptr = 0
    def after_loss(self):
        z = F.normalize(self.model.emb)
        same = (self.y[:,None] == self.labels[None]).float()
        logp = F.log_softmax(z @ self.bank.T/self.temp, 1)
        loss = -(logp*same).sum(1)/same.sum(1).clamp_min(1)
        self.learn.loss_grad = self.learn.loss_grad + self.weight*loss.mean()
        self.learn.loss = self.learn.loss_grad.clone()
    @torch.no_grad()
    def after_step(self):
        n = len(self.x)
        self.bank[self.ptr:self.ptr+n] = F.normalize(self.model.emb.detach())
        self.labels[self.ptr:self.ptr+n] = self.y
        self.ptr = (self.ptr+n) % self.size

def embed(learn, dl):
    hook_of = learn.model.body
    with hook_output(hook_of) as h:
        zs,ys = [],[]
        learn.model.eval()
        for x,y in dl:
            with torch.no_grad(): learn.model(x)
            zs.append(F.normalize(h.stored).cpu())
            ys.append(y.cpu())
    return torch.cat(zs).as_subclass(Tensor),torch.cat(ys).as_subclass(Tensor)

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (640, 2) if small else (1797, 5)
    digits = load_digits()
    x,y = TensorImageBW(torch.tensor(digits.images[:n], dtype=torch.float)[:,None]/16),TensorCategory(digits.target[:n])
    dsets = Datasets(range(n), [[x.__getitem__], [y.__getitem__]], splits=RandomSplitter(.2, seed=seed)(range(n)))
    dls = dsets.dataloaders(bs=32, num_workers=0)
    learn = Learner(dls, Net(), loss_func=ArcFaceLoss(), metrics=accuracy, cbs=[GrowMargin(), MemoryBank(128 if small else 256)])
    if xla: learn.to_xla()
    learn.fit_one_cycle(epochs, 1e-2)
    gallery,gy = embed(learn, learn.dls.train.new(shuffle=False, drop_last=False))
    query,qy = embed(learn, learn.dls.valid)
    top1 = (gy[(query @ gallery.T).argmax(1)] == qy).float().mean()
    return dict(metric=float(top1), classes=float(learn.recorder.values[-1][2]), losses=[learn.recorder.losses], learn=learn)
