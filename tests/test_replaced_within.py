"Methods of libraries that users replace, before a fit and within it: replayed as retraced, and as fastai on the CPU"
import fastai.layers
from torch.nn.functional import conv1d
from test_log import *

class Tick(Callback):
    "With it the user's code runs at every step"
    n = 0
    def before_batch(self): self.n += 1

def seed():
    for f in (torch.manual_seed, np.random.seed, random.seed, manual_seed): f(0)

def conv(): return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(24, 1))
def ranged(): return nn.Sequential(mlp(), SigmoidRange(-3, 3))

@pytest.mark.parametrize('owner,name,model,mine', [
    (nn.Conv1d, '_conv_forward', conv, lambda k, self, x, w, b: conv1d(x, w*k, b, padding=1)),
    (fastai.layers, 'sigmoid_range', ranged, lambda k, x, low, high: torch.sigmoid(x)*(high-low)*k + low)])
def test_a_private_method_of_a_library_is_patched_before_the_fit(owner, name, model, mine, monkeypatch):
    "And once more before the next fit, which is that of another story: it is called once a batch, with the number of then"
    for by in (.98, .97):
        calls = []
        def patched(*args):
            calls[0] += 1
            return mine(by**calls[0], *args)
        monkeypatch.setattr(owner, name, patched)
        def start():
            calls[:] = [0]
            return model()
        agree(lambda: dict(model=start, cbs=lambda: [Tick()], see=lambda l: list(calls)), tol=1e-6)
        assert calls == [36]   # of the last fit: 10 batches of training and 2 of validation, in 3 epochs

def test_it_is_patched_between_two_fits(monkeypatch):
    "The module was one call in the first"
    res = []
    for replay in (None, False, 'auto'):
        seed()
        learn = Learner(data(), conv(), loss_func=nn.MSELoss(), cbs=Tick())
        if replay is not None: learn.to_xla(replay=replay)
        n = [0]
        def patched(self, x, w, b):
            n[0] += 1
            return conv1d(x, w*.98**n[0], b, padding=1)
        with monkeypatch.context() as m, learn.no_bar(), learn.no_logging():
            learn.fit(1, 1e-2)
            m.setattr(nn.Conv1d, '_conv_forward', patched)
            learn.fit(1, 1e-2)
        res.append((list(map(float, learn.recorder.losses)), n, [host(p) for p in learn.model.parameters()]))
    for got,eps in ((res[1], 1e-6), (res[0], 1e-4)):
        test_close(res[2][0], got[0], eps=eps)
        assert res[2][1] == got[1]
        for a,b in zip(res[2][2], got[2]): test_close(a, b, eps=eps*20)
