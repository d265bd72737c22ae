"Time series: a loader that takes whole batches of an array, tensors of its own type, gaps drawn by numpy, convolutions and a transformer"
from fastai.vision.all import *
from fastai_xla.all import *

class Series(TensorBase): pass

def waves(n, seed, length=60):
    "Three channels; the class is the shape of a wave in one of them, the rest is a random walk"
    rng = np.random.RandomState(seed)
    t,y = np.arange(length)/length,rng.randint(0, 4, n)
    X = rng.randn(n, 3, length).cumsum(-1)*.1
    for i,k in enumerate(y):
        wave = np.sin(2*np.pi*((2,5)[k%2]*t + rng.rand()))
        X[i, 1] += np.sign(wave) if k > 1 else wave
    return X.astype(np.float32),y

class Arrays:
    "An item by its number, many by a slice or a list of numbers"
    def __init__(self, X, y): self.X,self.y = Series(X),TensorCategory(y)
    def __len__(self): return len(self.y)
    def __getitem__(self, rows): return self.X[rows],self.y[rows]

class ArrayLoader(TfmdDL):
    "Rows that follow each other are a view; shuffled ones are picked in one go"
    def create_batches(self, samps):
        for rows in chunked(samps, self.bs, drop_last=self.drop_last):
            yield self.dataset[rows if self.shuffle else slice(rows[0], rows[-1]+1)]

class CentreEach(Transform):
    "Each series by its own mean and deviation"
    order = 90
    def encodes(self, x:Series):
        x = x - x.mean((1, 2), keepdim=True)
        return x/(x.square().mean((1, 2), keepdim=True).sqrt() + 1e-6)

class Gap(RandTransform):
    "A sensor that was off: zeros from one time to another, the same for a whole batch"
    order = 95
    def encodes(self, x:Series):
        length = np.random.randint(1, x.size(2)//4)
        first = np.random.randint(0, x.size(2)-length)
        x = x.clone()
        x[:,:,first:first+length] = 0.
        return x

class Gain(RandTransform):
    "All of a batch louder or softer"
    order = 96
    def encodes(self, x:Series): return x*random.uniform(.85, 1.15)

def conv(ni, nf, ks): return nn.Conv1d(ni, nf, ks, padding='same', bias=False)

class Scales(Module):
    "Short, middle and long windows side by side, three times over, and a way past all of them"
    def __init__(self, ni, nf):
        def layer(a): return nn.ModuleList(conv(a, nf, ks) for ks in (5, 11, 21)), nn.BatchNorm1d(3*nf)
        self.layers = nn.ModuleList(nn.ModuleList(layer(a)) for a in (ni, 3*nf, 3*nf))
        self.past = nn.Sequential(nn.MaxPool1d(3, 1, 1), conv(ni, 3*nf, 1))
    def forward(self, x):
        past = self.past(x)
        for windows,norm in self.layers: x = norm(torch.cat([w(x) for w in windows], 1)).relu()
        return x + past

def convolutions(ni, c, nf=8): return nn.Sequential(Scales(ni, nf), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3*nf, c))

class Attention(Module):
    "A transformer over windows of a few steps"
    def __init__(self, ni, c, length, d=32, window=5):
        self.cut = nn.Conv1d(ni, d, window, stride=window)
        self.place = nn.Embedding(length//window, d)
        block = nn.TransformerEncoderLayer(d, 4, 2*d, dropout=0., batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d*(length//window), c)
    def forward(self, x):
        x = self.cut(x).transpose(1, 2) + self.place.weight
        return self.out(self.blocks(x).flatten(1))

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (640, 3) if small else (1600, 6)
    X,y = waves(n, seed)
    k = n*4//5
    tfms = [CentreEach(), Gap(p=.3), Gain(p=.5)]
    def loader(a, b, **kw): return ArrayLoader(Arrays(X[a:b], y[a:b]), num_workers=0, after_batch=tfms, **kw)
    dls = DataLoaders(loader(0, k, bs=32, shuffle=True, drop_last=True), loader(k, n, bs=64))
    dls.valid.split_idx = 1
    learns,accs = [],[]
    for model in (convolutions(3, 4), Attention(3, 4, 60)):
        learn = Learner(dls, model, loss_func=LabelSmoothingCrossEntropyFlat(), metrics=accuracy)
        if xla: learn.to_xla()
        learn.fit_one_cycle(epochs, 1e-2)
        accs.append(float(learn.recorder.values[-1][2]))
        learns.append(learn)
    return dict(metric=accs[0], attention=accs[1], losses=[o.recorder.losses for o in learns], learn=learns[0], others=learns[1:])
