"A GAN by hand: one module with both networks, a callback with an optimizer for each that does both steps and cancels fastai's"
from torch.utils.data import TensorDataset
from fastai.vision.all import *
from fastai_xla.all import *

def ring(n, seed):
    "Six small clouds on a circle"
    rng = np.random.RandomState(seed)
    a = rng.randint(0, 6, n)*np.pi/3
    return torch.tensor(np.stack([np.cos(a), np.sin(a)], 1) + .05*rng.randn(n, 2), dtype=torch.float)

def mlp(ni, nf, nh=32): return nn.Sequential(nn.Linear(ni, nh), nn.LeakyReLU(.2), nn.Linear(nh, nh), nn.LeakyReLU(.2), nn.Linear(nh, nf))

bce = F.binary_cross_entropy_with_logits

class GAN(Module):
    def __init__(self, nz): self.nz,self.generator,self.critic = nz,mlp(nz, 2),mlp(2, 1)
    def forward(self, z): return self.generator(z)

class GANTraining(Callback):
    "Both steps in `before_batch`; nothing is left for the Learner"
    def __init__(self, lr_g=3e-3, lr_d=3e-3): store_attr()
    def before_fit(self):
        self.opt_g = torch.optim.Adam(self.model.generator.parameters(), lr=self.lr_g, betas=(.5, .99))
        self.opt_d = torch.optim.Adam(self.model.critic.parameters(), lr=self.lr_d, betas=(.5, .99))
        self.losses_g,self.losses_d = [],[]
    def before_validate(self): raise CancelValidException
    def before_batch(self):
        real,m = self.xb[0],self.model
        z = torch.randn(len(real), m.nz, device=real.device)
        fake = m.generator(z)
        ones,zeros = torch.ones(len(real), 1, device=real.device),torch.zeros(len(real), 1, device=real.device)
        d_loss = bce(m.critic(real), ones) + bce(m.critic(fake.detach()), zeros)
        self.opt_d.zero_grad()
        d_loss.backward()
        self.opt_d.step()
        g_loss = bce(m.critic(fake), ones)
        self.opt_g.zero_grad()
        g_loss.backward()
        self.opt_g.step()
        self.losses_g.append(g_loss.detach())
        self.losses_d.append(d_loss.detach())
        raise CancelBatchException

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (1600, 20) if small else (3200, 50)
    x = ring(n, seed)
    dls = DataLoaders.from_dsets(TensorDataset(x), TensorDataset(x[:100]), bs=100, shuffle=True, num_workers=0, n_inp=1)
    learn = Learner(dls, GAN(8), loss_func=noop, cbs=[GANTraining()])
    if xla: learn.to_xla()
    learn.fit(epochs)
    with torch.no_grad(): made = learn.model.generator(torch.randn(1000, 8).to(learn.dls.device)).cpu()
    centres = torch.stack([torch.tensor([math.cos(a*math.pi/3), math.sin(a*math.pi/3)]) for a in range(6)])
    near = torch.cdist(made, centres).min(1).values < .3
    losses = learn.gan_training.losses_d,learn.gan_training.losses_g
    return dict(metric=float(near.float().mean()), losses=losses, learn=learn)
