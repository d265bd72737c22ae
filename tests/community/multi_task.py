"Three tasks on one body, weighted by uncertainties that are learned with it: the loss has parameters"
from sklearn.datasets import load_digits
from fastai.vision.all import *
from fastai_xla.all import *

class MultiTaskModel(Module):
    def __init__(self, body, nf): self.body,self.digit,self.even,self.ink = body,nn.Linear(nf, 10),nn.Linear(nf, 2),nn.Linear(nf, 1)
    def forward(self, x):
        x = self.body(x)
        return self.digit(x),self.even(x),self.ink(x)

class MultiTaskLoss(Module):
    "Kendall's: each task has a variance of its own"
    def __init__(self, n): self.log_vars = nn.Parameter(torch.zeros(n))
    def forward(self, preds, digit, even, ink):
        losses = CrossEntropyLossFlat()(preds[0], digit),CrossEntropyLossFlat()(preds[1], even),MSELossFlat()(preds[2], ink)
        return sum(torch.exp(-s)*l + s for s,l in zip(self.log_vars, losses))

def digit_accuracy(preds, digit, even, ink): return accuracy(preds[0], digit)
def even_accuracy(preds, digit, even, ink): return accuracy(preds[1], even)
def ink_rmse(preds, digit, even, ink): return torch.sqrt(F.mse_loss(preds[2].squeeze(-1), ink))

class LogWeights(Callback):
    "The weights after each epoch"
    def before_fit(self): self.history = []
    def after_epoch(self): self.history.append(self.learn.loss_func.log_vars.detach().cpu().numpy().copy())

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (600, 4) if small else (1797, 6)
    digits = load_digits()
    x = torch.tensor(digits.images[:n], dtype=torch.float)[:,None]/16
    y = torch.tensor(digits.target[:n])
    getters = [[o.__getitem__] for o in (TensorImageBW(x), TensorCategory(y), TensorCategory(y % 2), x.mean((1,2,3))*4)]
    dls = Datasets(range(n), getters, splits=RandomSplitter(.2, seed=seed)(range(n)), n_inp=1).dataloaders(bs=32, num_workers=0)
    body = nn.Sequential(ConvLayer(1, 16), ConvLayer(16, 32, stride=2), nn.AdaptiveAvgPool2d(2), Flatten())
    loss = MultiTaskLoss(3)
    learn = Learner(dls, MultiTaskModel(body, 128), loss_func=loss, metrics=[digit_accuracy, even_accuracy, ink_rmse],
        splitter=lambda m: [params(m), params(loss)], cbs=LogWeights)
    if xla: learn.to_xla()
    learn.fit_one_cycle(epochs, slice(1e-2, 2e-2))
    history = learn.log_weights.history
    digit,even,ink = map(float, learn.recorder.values[-1][2:])
    return dict(metric=digit, even=even, ink=ink, weights=history[-1].tolist(), losses=[learn.recorder.losses], learn=learn)
