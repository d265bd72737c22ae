"Data for each model, as numpy arrays: (inputs..., targets) to train on, and as much to look at afterwards. Nothing is downloaded"
import numpy as np

def _digits(n, n_valid):
    "scikit-learn's digits at 28x28; the training digits are repeated up to `n`"
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits
    d = load_digits()
    x,y = np.stack([zoom(o, 3.5, order=1) for o in d.images])[:, None].astype(np.float32)/16, d.target.astype(np.int64)
    x = (x-x.mean())/x.std()
    i = np.arange(n)%1500
    return (x[i], y[i]), (x[1500:][:n_valid], y[1500:][:n_valid])

def _split(n, *arrays): return tuple(a[:n] for a in arrays), tuple(a[n:] for a in arrays)

def _images(n, n_valid, size=64):
    "Noise over one faint pattern per class"
    g = np.random.default_rng(0)
    y = g.integers(0, 10, n+n_valid)
    return _split(n, (g.standard_normal((10, 3, size, size))[y]*.3 + g.standard_normal((n+n_valid, 3, size, size))).astype(np.float32), y)

def _chain(g, shape, vocab=200):
    "Rows of words, each of which has four likely successors"
    successors,res = g.integers(2, vocab, (vocab, 4)),np.zeros(shape, np.int64)
    res[:,0] = g.integers(2, vocab, shape[0])
    for t in range(1, shape[1]): res[:,t] = successors[res[:,t-1], g.integers(0, 4, shape[0])]
    return res

def _words(n, n_valid, length=64):
    o = _chain(np.random.default_rng(0), (n+n_valid, length+1))
    return _split(n, o[:,:-1], o[:,1:])

def _stream(n, n_valid, bs, length=18):
    "Rows of `bs` long texts, cut so that each batch goes on where the one before ended"
    o = _chain(np.random.default_rng(0), (bs, (n+n_valid)//bs*length+1))
    cut = lambda a: a.reshape(bs, -1, length).swapaxes(0, 1).reshape(-1, length)
    return _split(n, cut(o[:,:-1]), cut(o[:,1:]))

def _table(n, n_valid):
    g = np.random.default_rng(0)
    cats,conts = g.integers(0, 20, (n+n_valid, 8)),g.standard_normal((n+n_valid, 8)).astype(np.float32)
    return _split(n, cats, conts, (cats[:,0]%4*.5 + conts[:,0] > .7).astype(np.int64))

# batch size, steps of an epoch
sizes = dict(convnet=(64,125), resnet18=(8,12), resnet34=(8,12), resnet50=(8,12), transformer=(32,25), tabular=(64,125), awd_lstm=(16,25))

def make_data(
    model:str, # Name of a model
    bs:int, # Batch size
    steps:int, # Batches of an epoch
): # Training arrays, validation arrays: whole batches
    n,n_valid = bs*steps, max(2*bs, 64)
    if model == 'convnet': return _digits(n, 256)
    if model == 'awd_lstm': return _stream(n, n_valid, bs)
    return dict(transformer=_words, tabular=_table).get(model, _images)(n, n_valid)
