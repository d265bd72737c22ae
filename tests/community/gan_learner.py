"fastai's GANLearner with a critic of one's own, a switcher, and a learning rate for each network"
from sklearn.datasets import load_digits
from fastai.vision.all import *
from fastai.vision.gan import *
from fastai_xla.all import *

def generator():
    hidden = nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(128, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8)))

def basic_mlp():
    "Scores one number per image"
    hidden = nn.Linear(64, 64), nn.LeakyReLU(.2), nn.Linear(64, 32), nn.LeakyReLU(.2)
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, 1), nn.Flatten(0))

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (320, 3) if small else (1600, 12)
    x = TensorImage(torch.tensor(load_digits().images[:n], dtype=torch.float)[:,None]/8-1)
    block = DataBlock(blocks=(TransformBlock, TransformBlock), get_x=partial(generate_noise, size=16), get_y=x.__getitem__,
        splitter=IndexSplitter([]))
    dls = block.dataloaders(range(n), bs=32, num_workers=0)
    gen,critic = generator(),basic_mlp()
    switcher,lrs = FixedGANSwitcher(n_crit=2, n_gen=1),GANDiscriminativeLR(2.)
    learn = GANLearner.wgan(dls, gen, critic, switcher=switcher, opt_func=RMSProp, cbs=lrs, clip=.05)
    learn.recorder.train_metrics,learn.recorder.valid_metrics = True,False
    if xla: learn.to_xla()
    learn.fit(epochs, 1e-3, wd=0.)
    learn.gan_trainer.switch(gen_mode=True)
    with torch.no_grad(): made = learn.model.generator(torch.randn(500, 16).to(learn.dls.device)).cpu()
    far = (made.mean(0)-x.mean(0)).abs().mean()
    return dict(metric=1-float(far), losses=[learn.recorder.losses], learn=learn)
