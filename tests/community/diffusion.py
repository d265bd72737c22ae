"Diffusion as in the course's second part: noise by a callback, a time-conditioned U-Net that saves what it passes, sampling by DDIM"
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from fastai.vision.all import *
from fastai_xla.all import *

def abar(t): return (t*math.pi/2).cos()**2

def timestep_embedding(t, n, max_period=1000):
    e = -math.log(max_period)*torch.linspace(0, 1, n//2, device=t.device)
    e = t[:,None].float()*e.exp()[None]*100
    return torch.cat([e.sin(), e.cos()], -1)

class ResBlock(Module):
    def __init__(self, n_emb, ni, nf):
        self.emb,self.conv1,self.conv2 = nn.Linear(n_emb, 2*nf),self.pre(ni, nf),self.pre(nf, nf)
        self.skip = noop if ni == nf else nn.Conv2d(ni, nf, 1)
    def pre(self, ni, nf): return nn.Sequential(nn.GroupNorm(1, ni), nn.SiLU(), nn.Conv2d(ni, nf, 3, padding=1))
    def forward(self, x, t):
        scale,shift = self.emb(F.silu(t))[:,:,None,None].chunk(2, 1)
        return self.conv2(self.conv1(x)*(1+scale)+shift) + self.skip(x)

class SavedResBlock(ResBlock):
    "Keeps what it returns for the way up"
    def forward(self, x, t):
        self.saved = super().forward(x, t)
        return self.saved

class UNet(Module):
    def __init__(self, nf=16):
        self.n_emb = nf*2
        self.mlp = nn.Sequential(nn.Linear(self.n_emb, self.n_emb), nn.SiLU(), nn.Linear(self.n_emb, self.n_emb))
        self.inp = nn.Conv2d(1, nf, 3, padding=1)
        self.downs = nn.ModuleList([SavedResBlock(self.n_emb, nf, nf), SavedResBlock(self.n_emb, nf, 2*nf)])
        self.pool,self.mid = nn.AvgPool2d(2),ResBlock(self.n_emb, 2*nf, 2*nf)
        self.ups = nn.ModuleList([ResBlock(self.n_emb, 4*nf, nf), ResBlock(self.n_emb, 2*nf, nf)])
        self.out = nn.Conv2d(nf, 1, 3, padding=1)
    def forward(self, inp):
        x,t = inp
        t = self.mlp(timestep_embedding(t, self.n_emb))
        x = self.downs[0](self.inp(x), t)
        x = self.downs[1](self.pool(x), t)
        x = self.mid(x, t)
        saved = [d.saved for d in self.downs]
        x = self.ups[0](torch.cat([x, saved.pop()], 1), t)
        x = F.interpolate(x, scale_factor=2., mode='nearest')
        return self.out(self.ups[1](torch.cat([x, saved.pop()], 1), t))

class DDPM(Callback):
    "The batch becomes a noisy image, its time and its noise"
    order = 5
    def before_batch(self):
        x0 = self.xb[0]
        t = torch.rand(len(x0), device=x0.device).clamp(0, .999)
        eps = torch.randn_like(x0)
        a = abar(t).reshape(-1, 1, 1, 1)
        self.learn.xb,self.learn.yb = ((a.sqrt()*x0 + (1-a).sqrt()*eps, t),),(eps,)

@torch.no_grad()
def sample(model, n, steps, device):
    "DDIM without noise, as a plain loop with the times on the host"
    model.eval()
    x,ts = torch.randn(n, 1, 8, 8).to(device),torch.linspace(1-1/steps, 0, steps)
    for t in ts:
        a,a1 = abar(t),abar(t-1/steps) if t >= 1/steps else tensor(1.)
        noise = model((x, t[None].to(device).expand(n)))
        x0 = ((x-(1-a).sqrt().to(device)*noise)/a.sqrt().to(device)).clamp(-1, 1)
        x = a1.sqrt().to(device)*x0 + (1-a1).sqrt().to(device)*noise
    return x.cpu()

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (480, 4) if small else (1600, 12)
    x = torch.tensor(load_digits().images[:n], dtype=torch.float)[:,None]/8-1
    dls = DataLoaders.from_dsets(TensorDataset(x[:-n//10]), TensorDataset(x[-n//10:]), bs=32, shuffle=True, num_workers=0, n_inp=1)
    learn = Learner(dls, UNet(), loss_func=nn.MSELoss(), cbs=[DDPM(), GradientClip(1.)], opt_func=partial(Adam, eps=1e-5))
    if xla: learn.to_xla()
    learn.fit_one_cycle(epochs, 5e-3)
    made = sample(learn.model, 100, 10, learn.dls.device)
    far = (made.mean(0)-x.mean(0)).abs().mean()
    valid = float(learn.recorder.values[-1][1])
    return dict(metric=1-valid, far=float(far), losses=[float(l) for l in learn.recorder.losses], learn=learn)
