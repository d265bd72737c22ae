"Diffusion by denoising: noise by a callback, a small U-Net that tells its blocks the time, images made in a few steps without noise"
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from fastai.vision.all import *
from fastai_xla.all import *

n_times = 100
kept = (1-torch.linspace(1e-3, .12, n_times)).cumprod(0)   # how much of an image's variance is left at each time

class TimedConv(Module):
    "Two convolutions; between them each channel is scaled by what the time says"
    def __init__(self, ni, nf):
        self.first,self.second = ConvLayer(ni, nf, norm_type=None, act_cls=nn.SiLU),ConvLayer(nf, nf, norm_type=None, act_cls=nn.SiLU)
        self.scale,self.past = nn.Embedding(n_times, nf),nn.Conv2d(ni, nf, 1)
        nn.init.ones_(self.scale.weight)
    def forward(self, x): return self.past(x) + self.second(self.first(x)*self.scale(self.time)[:,:,None,None])

class Denoiser(Module):
    "What noise is in these images?"
    def __init__(self, nf=16):
        self.widen,self.narrow = nn.Conv2d(1, nf, 3, padding=1),nn.Conv2d(nf, 1, 3, padding=1)
        self.outer,self.inner,self.merge = TimedConv(nf, nf),nn.Sequential(TimedConv(nf, 2*nf), TimedConv(2*nf, 2*nf)),TimedConv(3*nf, nf)
    def forward(self, images, times):
        for m in self.modules():
            if isinstance(m, TimedConv): m.time = times
        fine = self.outer(self.widen(images))
        coarse = F.interpolate(self.inner(F.avg_pool2d(fine, 2)), size=fine.shape[-2:])
        return self.narrow(self.merge(torch.cat([fine, coarse], 1)))

class AddNoise(Callback):
    "The model gets noisy images and their times, and has to name the noise"
    def before_fit(self): self.kept = kept.to(self.dls.device)
    def before_batch(self):
        images, = self.xb
        times = torch.randint(n_times, (len(images),), device=images.device)
        noise,share = torch.randn_like(images),self.kept[times][:,None,None,None]
        self.learn.xb,self.learn.yb = (share.sqrt()*images + (1-share).sqrt()*noise, times),(noise,)

@torch.no_grad()
def generate(model, n, steps, device):
    "From noise: guess the image, and go on from that guess at an earlier time; the times are Python's"
    model.eval()
    x = torch.randn(n, 1, 8, 8).to(device)
    times = np.linspace(n_times-1, 0, steps).round().astype(int).tolist()
    for now,then in zip(times, times[1:]+[None]):
        noise = model(x, torch.full((n,), now, device=device))
        share,later = float(kept[now]),1. if then is None else float(kept[then])
        guess = ((x - (1-share)**.5*noise)/share**.5).clamp(-1, 1)
        x = later**.5*guess + (1-later)**.5*noise
    return x.cpu()

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs,steps = (480, 3, 5) if small else (1600, 12, 10)
    x = torch.tensor(load_digits().images[:n], dtype=torch.float)[:,None]/8-1
    dls = DataLoaders.from_dsets(TensorDataset(x[:-n//10]), TensorDataset(x[-n//10:]), bs=32, shuffle=True, num_workers=0, n_inp=1)
    learn = Learner(dls, Denoiser(), loss_func=nn.MSELoss(), cbs=[AddNoise(), GradientClip(1.)], opt_func=partial(Adam, eps=1e-5))
    if xla: learn.to_xla()
    learn.fit_one_cycle(epochs, 5e-3)
    made = generate(learn.model, 100, steps, learn.dls.device)
    far = (made.mean(0)-x.mean(0)).abs().mean()
    return dict(metric=1-float(learn.recorder.values[-1][1]), far=float(far), losses=[learn.recorder.losses], learn=learn)
