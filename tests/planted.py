"Faults on purpose, each marked in its line, and a fit that is watched"
import inspect, warnings
from pathlib import Path
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.explain import XLAReportCallback
from common import *

def line_of(o):
    "File and line of what is planted in a class or function, as the reports write it"
    lines,start = inspect.getsourcelines(o)
    return f"{Path(inspect.getsourcefile(o)).name}, line {next(i for i,l in enumerate(lines, start) if l.rstrip().endswith('# planted'))}"

def watched(cbs=None, n_epoch=1, replay='auto', **kwargs):
    "A learner after a watched fit, and what that has warned of"
    set_seed(0)
    learn = image_learner(cbs=cbs, **kwargs).to_xla(replay=replay)
    learn.remove_cb(ProgressCallback)
    with warnings.catch_warnings(record=True) as told, learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(n_epoch, 1e-2, cbs=XLAReportCallback())
    return learn,[str(w.message) for w in told if str(w.message).startswith('In ')]

class Planted(Callback):
    run_valid = False

class Item(Planted):
    def after_loss(self):
        self.learn.seen = self.loss.item()                  # planted

class Crop(Planted):
    def before_batch(self):
        if self.train_iter % 3 == 2: self.learn.xb = (self.x[:, :, :6],)   # planted

class Index(Planted):
    def after_pred(self):
        p = self.pred.detach()
        self.learn.seen = p[p > 0].sum()                    # planted

class Bessel(Planted):
    def after_loss(self):
        self.learn.seen = torch.i0(self.loss.detach())  # planted

class Weighted:
    "A Python number in the loss that changes in each step"
    steps = 0
    def __call__(self, pred, y):
        self.steps += 1
        return F.cross_entropy(pred, y) * (1 + .01*self.steps)   # planted

def opt_before_move(learn):
    learn.create_opt()
    learn.model.to(device())
    learn.dls.to(device())
def frozen(learn): learn.model[1][3].weight.requires_grad_(False)
def on_the_cpu(learn):
    learn.model.to(device())
    learn.dls.to(device())
    learn.model[1][3].weight = nn.Parameter(learn.model[1][3].weight.detach().cpu())
def nan_gradient(learn):
    learn.model[1][3].weight.register_hook(
        lambda g: torch.where(torch.arange(g.numel(), device=g.device).view(g.shape) == 5, float('nan'), g))

class WrongTanh(torch.autograd.Function):
    "tanh by hand, with a derivative that is wrong on XLA"
    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y
    @staticmethod
    def backward(ctx, g): return g*(1-ctx.saved_tensors[0]**2)*(1.001 if g.device.type == 'xla' else 1)   # planted

class Tanh(Module):
    def forward(self, x): return WrongTanh.apply(x)

class OtherEps(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-3 if x.device.type == 'xla' else self.eps) # planted

def tanh_net(tanh=nn.Tanh, norm=nn.LayerNorm):
    return nn.Sequential(nn.Linear(6, 8), tanh(), nn.Linear(8, 8), nn.GELU(), norm(8), nn.Linear(8, 3))
points = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)),torch.arange(16) % 3
