"The models in PyTorch, for every peer that runs PyTorch"
import torch
from torch import nn
import torch.nn.functional as F

# fastai's ConvLayer
def conv(ni, nf, stride=1): return nn.Sequential(nn.Conv2d(ni, nf, 3, stride, 1, bias=False), nn.BatchNorm2d(nf), nn.ReLU())

def convnet():
    return nn.Sequential(conv(1, 32, 2), conv(32, 64, 2), conv(64, 128, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))

class Block(nn.Module):
    "A pre-norm transformer block; takes and returns (n, length, d)"
    def __init__(self, d, heads):
        super().__init__()
        self.heads,self.ln1,self.ln2 = heads,nn.LayerNorm(d),nn.LayerNorm(d)
        self.qkv,self.out = nn.Linear(d, 3*d),nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4*d), nn.GELU(), nn.Linear(4*d, d))
    def forward(self, x):
        n,t,d = x.shape
        q,k,v = self.qkv(self.ln1(x)).view(n, t, 3, self.heads, d//self.heads).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, d))
        return x + self.mlp(self.ln2(x))

class Transformer(nn.Module):
    def __init__(self, vocab=200, length=64, d=128, heads=4, layers=4):
        super().__init__()
        self.emb,self.pos = nn.Embedding(vocab, d),nn.Parameter(torch.randn(length, d)*.02)
        self.body = nn.Sequential(*[Block(d, heads) for _ in range(layers)], nn.LayerNorm(d), nn.Linear(d, vocab))
    def forward(self, x): return self.body(self.emb(x)+self.pos)

def tabular():
    from fastai.tabular.model import TabularModel
    return TabularModel([(20, 8)]*8, 8, 2, [200, 100])

def awd_lstm():
    from fastai.text.all import AWD_LSTM, awd_lstm_lm_config, get_language_model
    return get_language_model(AWD_LSTM, 200, config=awd_lstm_lm_config | dict(emb_sz=64, n_hid=128, n_layers=2))

def make_model(name):
    torch.manual_seed(0)
    if name in (here := dict(convnet=convnet, transformer=Transformer, tabular=tabular, awd_lstm=awd_lstm)): return here[name]()
    import torchvision.models
    return getattr(torchvision.models, name)(num_classes=10)

uses_sgd = lambda name: name == 'convnet' or name.startswith('resnet')
lrs = dict(convnet=.05, transformer=1e-3, tabular=1e-3, awd_lstm=3e-3)
lr_of = lambda name: lrs.get(name, .01)

def make_opt(name, params):
    "fastai's SGD with momentum, or Adam with its defaults, in torch's terms"
    if uses_sgd(name): return torch.optim.SGD(params, lr_of(name), momentum=.9)
    return torch.optim.AdamW(params, lr_of(name), betas=(.9,.99), eps=1e-5, weight_decay=.01)

def cross_entropy(out, y): return F.cross_entropy(out.flatten(0, -2), y.flatten())

def loss_of(out, y):
    "Cross entropy; for AWD_LSTM with its two regularizers, as in fastai's `rnn_cbs(2, 1)`"
    if not isinstance(out, tuple): return cross_entropy(out, y)
    pred,raw,dropped = [o[-1] if isinstance(o, (list, tuple)) else o for o in out]
    return cross_entropy(pred, y) + 2*dropped.pow(2).mean() + (raw[:,1:]-raw[:,:-1]).pow(2).mean()

def datasets(arrays): return [torch.utils.data.TensorDataset(*map(torch.from_numpy, a)) for a in arrays]

@torch.no_grad()
def score(model, ds, bs):
    "Loss and accuracy on the CPU, when all is over"
    model = model.cpu().eval()
    if hasattr(model, 'reset'): model.reset()
    outs = [(model(*b[:-1]), b[-1]) for b in torch.utils.data.DataLoader(ds, bs)]
    out,y = torch.cat([o[0] if isinstance(o, tuple) else o for o,_ in outs]),torch.cat([y for _,y in outs])
    return dict(loss=cross_entropy(out, y).item(), accuracy=(out.argmax(-1) == y).float().mean().item())
