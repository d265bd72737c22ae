"Sounds by their spectrograms: tensor types of one's own, an item transform with torch.stft, masks and a normalization on the batch"
from fastai.vision.all import *
from fastai_xla.all import *

class Waveform(TensorBase): pass
class Spectrum(TensorImageBase): pass

def sound(kind, rng, sr=2000, n=2000):
    "A rising tone, a falling one, a steady one, or two at once"
    t,lo,hi = np.arange(n)/sr,200+100*rng.rand(),600+200*rng.rand()
    sweep = dict(up=lo*t+(hi-lo)*t**2/2, down=hi*t-(hi-lo)*t**2/2, steady=lo*2*t)
    wave = np.sin(2*np.pi*sweep[kind]) if kind in sweep else np.sin(2*np.pi*lo*t)+np.sin(2*np.pi*hi*t)
    return torch.tensor(wave + .3*rng.randn(n), dtype=torch.float)

class AnySecond(Transform):
    "So many samples from a random place, in validation too"
    def __init__(self, n): self.n = n
    def encodes(self, o:Waveform): return o.narrow(0, np.random.randint(len(o)-self.n+1), self.n)

class Loudness(Transform):
    "How loud each frequency is at each time, on a scale of the ear"
    def __init__(self, bins=64): self.bins,self.window = bins,torch.hann_window(2*bins)
    def encodes(self, o:Waveform):
        parts = torch.stft(o, 2*self.bins, hop_length=self.bins, window=self.window, return_complex=True)
        return Spectrum((parts.abs().square() + 1e-6).log10().unsqueeze(0)/2)

class Silence(RandTransform):
    "A few rows and a few columns, other ones in each item, say no more than its mean"
    order = 20
    def __init__(self, width=8, **kwargs):
        self.width = width
        super().__init__(**kwargs)
    def hidden(self, x, size):
        first = torch.rand(len(x), 1, device=x.device)*(size-self.width)
        place = torch.arange(size, device=x.device) - first
        return (place >= 0) & (place < self.width)
    def encodes(self, x:Spectrum):
        n_rows,n_cols = x.shape[-2:]
        mask = self.hidden(x, n_rows)[:,None,:,None] | self.hidden(x, n_cols)[:,None,None]
        return torch.where(mask, x.mean((1, 2, 3), keepdim=True), x)

class Whiten(Transform):
    "By the mean and deviation of the first batches"
    order = 99
    def setups(self, dl):
        some = torch.cat([x for x,_ in itertools.islice(dl, 2)])
        self.centre,self.scale = some.mean(),some.std()
    def encodes(self, x:Spectrum): return (x-self.centre)/self.scale

def convnet():
    body = ConvLayer(1, 8, stride=2), ConvLayer(8, 16, stride=2), ConvLayer(16, 32, stride=2)
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), Flatten(), nn.Linear(128, 4))

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (320, 4) if small else (960, 6)
    rng,kinds = np.random.RandomState(seed),['up', 'down', 'steady', 'chord']
    sounds = [(sound(k, rng), k) for k in kinds*(n//4)]
    block = DataBlock(blocks=(TransformBlock(type_tfms=lambda o: Waveform(o)), CategoryBlock), getters=[ItemGetter(0), ItemGetter(1)],
        splitter=RandomSplitter(.2, seed=seed), item_tfms=[AnySecond(1800), Loudness()], batch_tfms=[Silence(p=.5), Whiten()])
    dls = block.dataloaders(sounds, bs=32, num_workers=0)
    model = convnet() if small else xresnet18(n_out=4, c_in=1, widen=.25, stem_szs=(8, 8, 16))
    opt_func = Adam if small else ranger
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=[error_rate, accuracy], opt_func=opt_func)
    if xla: learn.to_xla()
    learn.fit_one_cycle(epochs, 1e-2)
    losses = [learn.recorder.losses]
    interp = ClassificationInterpretation.from_learner(learn)
    confused = interp.confusion_matrix()
    worst_first,_ = interp.top_losses()
    return dict(metric=float(np.trace(confused)/confused.sum()), valid=float(worst_first.mean()), losses=losses, learn=learn)
