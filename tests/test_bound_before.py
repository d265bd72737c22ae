"Functions of torch that a program has bound before anything was logged, as PyTorch's tutorials do: `relu = MyReLU.apply`"
import json
import own_process

program = '''
import json, sys, warnings
warnings.filterwarnings('ignore')
from torch.autograd import backward
from fastai.vision.all import *

class Sparsemax(torch.autograd.Function):
    "As TabNet has it: its input is changed in place, and a helper of the class is called"
    @staticmethod
    def forward(ctx, x):
        x -= x.max(-1, keepdim=True)[0]
        out = torch.clamp(x-Sparsemax.threshold(x), min=0)
        ctx.save_for_backward(out)
        return out
    @staticmethod
    def backward(ctx, g):
        out, = ctx.saved_tensors
        on = (out > 0).float()
        return on*(g-(g*on).sum(-1, keepdim=True)/on.sum(-1, keepdim=True))
    @staticmethod
    def threshold(x):
        s,_ = torch.sort(x, descending=True, dim=-1)
        n = torch.arange(1, x.shape[-1]+1, device=x.device, dtype=x.dtype)
        sums = s.cumsum(-1)-1
        size = (n*s > sums).sum(-1, keepdim=True)
        return sums.gather(-1, size-1)/size
sparsemax = Sparsemax.apply

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(6, 8),nn.Linear(8, 1)
    def forward(self, x): return self.b(sparsemax(self.a(x)))

class Backward(Callback):
    def before_backward(self):
        backward(self.learn.loss_grad)
        raise CancelBackwardException()

from fastai_xla.all import *
import fastai_xla.capture.patches as patches
if 'unseen' in sys.argv: patches._lead_to = lambda ours, f: None
g = torch.Generator().manual_seed(0)
x,y = torch.randn(80, 6, generator=g),torch.randn(80, 1, generator=g)

def fitted(on_xla):
    set_seed(0)
    dls = DataLoaders.from_dsets(list(zip(x[:64], y[:64])), list(zip(x[64:], y[64:])), bs=8, num_workers=0)
    learn = Learner(dls, Net(), loss_func=nn.MSELoss(), cbs=Backward() if 'backward' in sys.argv else None)
    if on_xla: learn.to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
    return learn,torch.stack(learn.recorder.losses).cpu(),[p.detach().cpu() for p in learn.model.parameters()]

_,losses,params = fitted(False)
learn,losses2,params2 = fitted(True)
print(json.dumps(dict(losses=(losses-losses2).abs().max().item(), params=max((a-b).abs().max().item() for a,b in zip(params, params2)),
    why=list(learn.xla_opt.replay.reasons.why), plain=sum(learn.xla_opt.replay.fit.plain.values()),
    replayed=learn.xla_opt.replay.by_log.fit.counts[True]['replayed'])))
'''

def ran(tmp_path, *args):
    res = own_process.run(['-c', program.replace("sys.argv", str(list(args)))], tmp_path)
    assert not res.returncode, res.stderr[-3000:]
    return json.loads(res.stdout.splitlines()[-1])

def test_functions_bound_before_the_first_fit_are_seen(tmp_path):
    r = ran(tmp_path, 'backward')
    assert r['losses'] < 1e-5 and r['params'] < 1e-5 and r['plain'] == 0 and r['replayed'] == 15, r

def test_an_autograd_function_that_is_not_seen_is_noticed(tmp_path):
    "Without a door for `apply` its operators are logged, and its gradient is not: steps are retraced, and numbers stay right"
    r = ran(tmp_path, 'unseen')
    assert r['losses'] < 1e-5 and r['params'] < 1e-5 and r['replayed'] == 0, r
    assert any('is given a graph by code that is not seen there' in why for why in r['why']), r
