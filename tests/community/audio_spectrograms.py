"Sounds by their spectrograms: a tensor type of one's own, an item transform with torch.stft, SpecAugment on the batch"
from fastai.vision.all import *
from fastai_xla.all import *

class AudioTensor(TensorBase): pass
class AudioSpectrogram(TensorImageBase): pass

def AudioBlock(): return TransformBlock(type_tfms=lambda x: AudioTensor(x))

def sound(kind, rng, sr=2000, n=2000):
    "A rising tone, a falling one, a steady one, or two at once"
    t,lo,hi = np.arange(n)/sr,200+100*rng.rand(),600+200*rng.rand()
    sweep = dict(up=lo*t+(hi-lo)*t**2/2, down=hi*t-(hi-lo)*t**2/2, steady=lo*2*t)
    wave = np.sin(2*np.pi*sweep[kind]) if kind in sweep else np.sin(2*np.pi*lo*t)+np.sin(2*np.pi*hi*t)
    return torch.tensor(wave + .3*rng.randn(n), dtype=torch.float)

class CropSignal(Transform):
    "The same length for all, from a random place in training"
    split_idx = None
    def __init__(self, n): self.n = n
    def encodes(self, x:AudioTensor):
        at = random.randint(0, x.shape[-1]-self.n)
        return x[at:at+self.n]

class AudioToSpec(Transform):
    "A spectrogram in decibels"
    def __init__(self, n_fft=128, hop=64): store_attr()
    def encodes(self, x:AudioTensor):
        spec = torch.stft(x, self.n_fft, self.hop, window=torch.hann_window(self.n_fft), return_complex=True).abs()
        return AudioSpectrogram((10*torch.log10(spec**2 + 1e-6))[None]/20)

class SpecAugment(RandTransform):
    "Bands of frequency and of time are set to the mean, others for each item"
    order = 20
    def __init__(self, size=8, **kwargs):
        super().__init__(**kwargs)
        self.size = size
    def encodes(self, x:AudioSpectrogram):
        for d in (2, 3):
            n = x.shape[d]
            start = torch.rand(len(x), device=x.device)*(n-self.size)
            at = torch.arange(n, device=x.device)[None]
            band = (at >= start[:,None]) & (at < start[:,None]+self.size)
            x = torch.where(band[:,None,:,None] if d == 2 else band[:,None,None], x.mean((1,2,3), keepdim=True), x)
        return x

class SpecNormalize(Transform):
    order = 99
    def setups(self, dl):
        x = torch.cat([b[0] for b in itertools.islice(dl, 2)])
        self.mean,self.std = x.mean(),x.std()
    def encodes(self, x:AudioSpectrogram): return (x-self.mean)/self.std

def convnet():
    body = ConvLayer(1, 8, stride=2), ConvLayer(8, 16, stride=2), ConvLayer(16, 32, stride=2)
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), Flatten(), nn.Linear(128, 4))

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (320, 4) if small else (960, 6)
    rng,kinds = np.random.RandomState(seed),['up', 'down', 'steady', 'chord']
    files = [(sound(k, rng), k) for k in kinds*(n//4)]
    block = DataBlock(blocks=(AudioBlock, CategoryBlock), get_x=lambda i: files[i][0], get_y=lambda i: files[i][1],
        splitter=RandomSplitter(.2, seed=seed),
        item_tfms=[CropSignal(1800), AudioToSpec()], batch_tfms=[SpecAugment(p=.5), SpecNormalize()])
    dls = block.dataloaders(range_of(files), bs=32, num_workers=0)
    model = convnet() if small else xresnet18(n_out=4, c_in=1, widen=.25, stem_szs=(8, 8, 16))
    opt_func = Adam if small else ranger
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=[error_rate, accuracy], opt_func=opt_func)
    if xla: learn.to_xla()
    learn.fit_one_cycle(epochs, 1e-2)
    losses_seen = [float(l) for l in learn.recorder.losses]
    interp = ClassificationInterpretation.from_learner(learn)
    confused = interp.confusion_matrix()
    losses,idxs = interp.top_losses(3)
    return dict(metric=float(np.trace(confused)/confused.sum()), top=float(losses[0]), losses=losses_seen, learn=learn)
