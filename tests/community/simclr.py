"Contrastive pretraining by SimCLR, judged by nearest neighbours of the embeddings"
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from fastai.vision.all import *
from fastai_xla.all import *
from .byol import conv_features, head, random_view

def nt_xent(z, *labels, temp=.2):
    "Cross entropy of the other view of an image among all other views of the batch; labels are not looked at"
    n = len(z)
    z = F.normalize(z)
    scores = z @ z.T / temp
    positive = (z*z.roll(n//2, 0)).sum(1)/temp
    itself = torch.eye(n, dtype=torch.bool, device=z.device)
    return (scores[~itself].view(n, n-1).logsumexp(1) - positive).mean()

class ViewPairs(Callback):
    "First half of the batch: one view of each image. Second half: another"
    run_valid = True
    def before_batch(self): self.learn.xb = (torch.cat([random_view(self.x) for _ in range(2)]),)

@torch.no_grad()
def features(learn, dl):
    "Of the encoder: the projection is thrown away"
    net = learn.model[0].eval()
    xs,ys = zip(*((net(x).cpu(), y.cpu()) for x,y in dl))
    return torch.cat(xs).numpy(),torch.cat(ys).numpy()

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (600, 2) if small else (1500, 5)
    digits = load_digits()
    idxs = np.random.RandomState(seed).permutation(1797)[:n]
    x,y = TensorImageBW(torch.tensor(digits.images[idxs], dtype=torch.float)[:,None]/16),TensorCategory(digits.target[idxs])
    dsets = Datasets(range(n), [[x.__getitem__], [y.__getitem__]], splits=RandomSplitter(.2, seed=seed)(range(n)))
    dls = dsets.dataloaders(bs=48, num_workers=0, drop_last=True)
    learn = Learner(dls, nn.Sequential(conv_features(), head(64, 32)), loss_func=nt_xent, cbs=ViewPairs)
    if xla: learn.to_xla()
    learn.fit_one_cycle(epochs, 1e-2)
    train,valid = (features(learn, dl.new(shuffle=False, drop_last=False)) for dl in learn.dls)
    score = KNeighborsClassifier(5).fit(*train).score(*valid)
    return dict(metric=score, contrast=float(learn.recorder.values[-1][1]), losses=[learn.recorder.losses], learn=learn)
