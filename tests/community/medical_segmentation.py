"Segmentation of volumes: a small 3-D U-Net, Dice and focal loss together, Dice as a metric, patients with lesions drawn more often"
from fastai.vision.all import *
from fastai.callback.data import *
from fastai_xla.all import *

class MedImage(TensorImageBase): pass
class MedMask(TensorMask): pass

def volumes(n, seed, size):
    "Noise with a bright ball, and in some a darker one within"
    rng = np.random.RandomState(seed)
    g = np.stack(np.meshgrid(*[np.arange(size)]*3, indexing='ij'))
    x,y = rng.randn(n, 1, size, size, size)*.3,np.zeros((n, size, size, size), dtype=np.int64)
    for i in range(n):
        c,r = rng.uniform(size/3, size*2/3, 3),rng.uniform(size/4, size*3/8)
        ball = ((g-c[:,None,None,None])**2).sum(0) < r**2
        y[i][ball],x[i,0][ball] = 1,x[i,0][ball]+1
        if rng.rand() < .5:
            core = ((g-c[:,None,None,None])**2).sum(0) < (r*.6)**2
            y[i][core],x[i,0][core] = 2,x[i,0][core]+1
    return MedImage(torch.tensor(x, dtype=torch.float)),MedMask(torch.tensor(y))

class UNet3d(Module):
    def __init__(self, ni, nc, nf=8):
        def conv(a, b): return ConvLayer(a, b, ndim=3, norm_type=NormType.Instance)
        def block(a, b): return nn.Sequential(conv(a, b), conv(b, b))
        self.d1,self.d2,self.mid,self.u1 = block(ni, nf),block(nf, 2*nf),block(2*nf, 2*nf),block(3*nf, nf)
        self.pool,self.up,self.out = nn.MaxPool3d(2),nn.ConvTranspose3d(2*nf, 2*nf, 2, stride=2),nn.Conv3d(nf, nc, 1)
    def forward(self, x):
        a = self.d1(x)
        b = self.mid(self.d2(self.pool(a)))
        return self.out(self.u1(torch.cat([a, self.up(b)], 1)))

class CombinedLoss:
    "Dice for the shape, focal for the rare class"
    def __init__(self, axis=1, smooth=1., alpha=1.):
        store_attr()
        self.focal,self.dice = FocalLossFlat(axis=axis),DiceLoss(axis, smooth)
    def __call__(self, pred, targ): return self.focal(pred, targ) + self.alpha*self.dice(pred, targ)
    def decodes(self, x): return x.argmax(dim=self.axis)
    def activation(self, x): return F.softmax(x, dim=self.axis)

def lesion_dice(pred, targ):
    p,t = pred.argmax(1) == 2,targ == 2
    return 2*(p & t).sum()/((p.sum() + t.sum()).clamp_min(1))

class RandomFlip3d(ItemTransform):
    "The same axes for image and mask"
    split_idx = 0
    def encodes(self, b):
        axes = [d for d in (1, 2, 3) if random.random() < .5]
        return (b[0].flip(axes), b[1].flip([a-1 for a in axes])) if axes else b

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs,size = (48, 7, 8) if small else (240, 6, 12)
    x,y = volumes(n, seed, size)
    dsets = Datasets(range(n), [[x.__getitem__], [y.__getitem__]], splits=RandomSplitter(.2, seed=seed)(range(n)))
    weights = [2. if y[i].max() == 2 else 1. for i in dsets.splits[0]]
    dls = dsets.weighted_dataloaders(weights, bs=8, num_workers=0, after_item=[RandomFlip3d()])
    metrics = [DiceMulti(), lesion_dice, foreground_acc]
    learn = Learner(dls, UNet3d(1, 3, 4 if small else 8), loss_func=CombinedLoss(), metrics=metrics, opt_func=ranger)
    if xla: learn.to_xla()
    learn.fit_flat_cos(epochs, 2e-2)
    losses = [learn.recorder.losses]
    row = learn.recorder.values[-1]
    inp,preds,targs,decoded = learn.get_preds(with_input=True, with_decoded=True)
    volume_error = (decoded == 2).sum().item()/max(1, (targs == 2).sum().item())
    part = learn.dls.valid.new(bs=4)
    again = learn.validate(dl=part)
    dls = dsets.partial_dataloaders(partial_n=32, bs=8, num_workers=0)
    quick = Learner(dls, learn.model, loss_func=CombinedLoss(), metrics=DiceMulti())
    if xla: quick.to_xla()
    quick.fit(1, 1e-3)
    losses.append(quick.recorder.losses)
    scores = dict(metric=float(row[2]), lesion=float(row[3]), volume=volume_error, again=float(again[1]))
    return scores | dict(losses=losses, learn=learn, others=[quick])
