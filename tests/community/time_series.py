"Time series: a loader that slices whole arrays, tensors of its own type, cutouts drawn by numpy, InceptionTime and a transformer"
from fastai.vision.all import *
from fastai_xla.all import *

class TSTensor(TensorBase):
    @property
    def vars(self): return self.shape[-2]
    @property
    def len(self): return self.shape[-1]

def series(n, seed, length=60):
    "Three channels; the class is the shape of a wave in one of them, the rest is a random walk"
    rng = np.random.RandomState(seed)
    t,y = np.arange(length)/length,rng.randint(0, 4, n)
    X = rng.randn(n, 3, length).cumsum(-1)*.1
    for i,k in enumerate(y):
        wave = np.sin(2*np.pi*((2,5)[k%2]*t + rng.rand()))
        X[i, 1] += np.sign(wave) if k > 1 else wave
    return X.astype(np.float32),y

class NumpyDatasets:
    "All items at once, by a slice or by indices"
    def __init__(self, X, y, vocab): self.X,self.y,self.vocab = TSTensor(X),TensorCategory(y),vocab
    def __len__(self): return len(self.X)
    def __getitem__(self, i): return self.X[i],self.y[i]
    def new_empty(self): return type(self)(self.X[:0], self.y[:0], self.vocab)

class TSDataLoader(TfmdDL):
    "Items are indices; a batch is taken as a whole"
    do_item = noops
    def create_batch(self, b):
        self.idxs = b
        return self.dataset[b if self.shuffle else slice(b[0], b[0]+self.bs)]
    def shuffle_fn(self, idxs): return np.random.permutation(idxs)

class TSStandardize(Transform):
    "Each series for itself"
    order = 90
    def encodes(self, o:TSTensor): return (o-o.mean((1,2), keepdim=True))/o.std((1,2), keepdim=True).clamp_min(1e-6)

class TSCutOut(RandTransform):
    "A section is set to zero, the same for the whole batch"
    order = 95
    def __init__(self, magnitude=.1, **kwargs):
        super().__init__(**kwargs)
        self.magnitude = magnitude
    def encodes(self, o:TSTensor):
        n,lambd = o.shape[-1],np.random.beta(self.magnitude, self.magnitude)
        width = int(round(n*min(lambd, 1-lambd)))
        start = np.random.randint(-width+1, n)
        out = o.clone()
        out[..., max(0, start):min(start+width, n)] = 0
        return out

class TSMagScale(RandTransform):
    "All are scaled by one number"
    order = 96
    def encodes(self, o:TSTensor): return o*(1+.3*(random.random()-.5))

class InceptionModule(Module):
    def __init__(self, ni, nf, ks=24):
        ks = [k if k % 2 else k-1 for k in (ks//2**i for i in range(3))]
        self.bottleneck = nn.Conv1d(ni, nf, 1, bias=False) if ni > 1 else noop
        self.convs = nn.ModuleList([nn.Conv1d(nf if ni > 1 else ni, nf, k, padding=k//2, bias=False) for k in ks])
        self.pooled = nn.Sequential(nn.MaxPool1d(3, stride=1, padding=1), nn.Conv1d(ni, nf, 1, bias=False))
        self.bn = nn.BatchNorm1d(nf*4)
    def forward(self, x):
        y = self.bottleneck(x)
        return F.relu(self.bn(torch.cat([l(y) for l in self.convs] + [self.pooled(x)], 1)))

class InceptionTime(Module):
    def __init__(self, ni, c, nf=8, depth=3):
        self.blocks = nn.ModuleList([InceptionModule(ni if d == 0 else nf*4, nf) for d in range(depth)])
        self.short = nn.Sequential(nn.Conv1d(ni, nf*4, 1, bias=False), nn.BatchNorm1d(nf*4))
        self.fc = nn.Linear(nf*4, c)
    def forward(self, x):
        res = x
        for d,l in enumerate(self.blocks):
            x = l(x)
            if d % 3 == 2: res = x = F.relu(x + self.short(res))
        return self.fc(x.mean(-1))

class TST(Module):
    "A transformer over time steps"
    def __init__(self, ni, c, length, d=32, heads=4, layers=2):
        self.inp = nn.Conv1d(ni, d, 3, padding=1)
        self.pos = nn.Parameter(torch.zeros(length, d).uniform_(-.02, .02))
        layer = nn.TransformerEncoderLayer(d, heads, 2*d, dropout=0., activation='gelu', batch_first=True)
        self.enc = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.GELU(), nn.Flatten(), nn.Linear(d*length, c))
    def forward(self, x): return self.head(self.enc(self.inp(x).transpose(1, 2) + self.pos))

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (640, 4) if small else (1600, 6)
    X,y = series(n, seed)
    k = n*4//5
    tfms = [TSStandardize(), TSCutOut(p=.3), TSMagScale(p=.5)]
    def loader(a, b, **kw): return TSDataLoader(NumpyDatasets(X[a:b], y[a:b], list('abcd')), num_workers=0, after_batch=tfms, **kw)
    dls = DataLoaders(loader(0, k, bs=32, shuffle=True, drop_last=True), loader(k, n, bs=64))
    dls.valid.split_idx = 1
    learns,accs,losses = [],[],[]
    for model in (InceptionTime(3, 4), TST(3, 4, 60)):
        learn = Learner(dls, model, loss_func=LabelSmoothingCrossEntropyFlat(), metrics=accuracy)
        if xla: learn.to_xla()
        learn.fit_one_cycle(epochs, 5e-3)
        accs.append(float(learn.recorder.values[-1][2]))
        losses += [float(l) for l in learn.recorder.losses]
        learns.append(learn)
    return dict(metric=accs[0], tst=accs[1], losses=losses, learn=learns[0], others=learns[1:])
