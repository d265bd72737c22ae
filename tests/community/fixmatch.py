"Few labels, many images without: FixMatch by a callback with a second loader; then pseudo-labels by hand"
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from fastai.vision.all import *
from fastai_xla.all import *

class FixMatch(Callback):
    "Weak and strong views of unlabelled images go through the model with the labelled ones"
    run_valid = False
    def __init__(self, unlabelled, strength=.3, threshold=.8, weight=1.): store_attr()
    def before_fit(self): self.batches = iter([])
    def next_images(self):
        try: b = next(self.batches)
        except StopIteration:
            self.batches = iter(self.unlabelled)
            b = next(self.batches)
        return b[0].to(self.dls.device)
    def before_batch(self):
        u,x = self.next_images(),self.x
        self.n,self.nu = len(x),len(u)
        weak,strong = u + .02*torch.randn_like(u),u*(.6+.8*torch.rand(len(u), 1, 1, 1, device=u.device)) + self.strength*torch.randn_like(u)
        self.learn.xb = (torch.cat([x, weak, strong]),)
    def after_pred(self):
        logits = self.pred
        self.weak,self.strong = logits[self.n:self.n+self.nu],logits[self.n+self.nu:]
        self.learn.pred = logits[:self.n]
    def after_loss(self):
        probs,guess = self.weak.detach().softmax(-1).max(-1)
        mask = probs.ge(self.threshold).float()
        loss_u = (F.cross_entropy(self.strong, guess, reduction='none')*mask).mean()
        self.kept = mask.mean()
        self.learn.loss_grad = self.learn.loss_grad + self.weight*loss_u
        self.learn.loss = self.learn.loss_grad.clone()

def net():
    body = ConvLayer(1, 16), ConvLayer(16, 32, stride=2), ConvLayer(32, 32, stride=2)
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), Flatten(), nn.Linear(128, 10))

def run(xla, seed, small=False):
    set_seed(seed)
    n_label,epochs = (96, 6) if small else (96, 25)
    digits = load_digits()
    idxs = np.random.RandomState(seed).permutation(1797)
    x,y = torch.tensor(digits.images[idxs], dtype=torch.float)[:,None]/16,torch.tensor(digits.target[idxs])
    labelled,valid,rest = TensorDataset(x[:n_label], y[:n_label]),TensorDataset(x[-400:], y[-400:]),x[n_label:-400]
    dls = DataLoaders.from_dsets(labelled, valid, bs=16, val_bs=100, shuffle=True, num_workers=0, drop_last=True)
    unlabelled = torch.utils.data.DataLoader(TensorDataset(rest), batch_size=48, shuffle=True, drop_last=True)
    learn = Learner(dls, net(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=FixMatch(unlabelled))
    if xla: learn.to_xla()
    learn.fit_one_cycle(epochs, 1e-2)
    losses = [learn.recorder.losses]
    first_score,kept = float(learn.recorder.values[-1][2]),float(learn.fix_match.kept)

    test_dl = DataLoader(TensorDataset(rest, torch.zeros(len(rest), dtype=torch.long)), bs=100, device=learn.dls.device)
    preds,_ = learn.get_preds(dl=test_dl)
    sure = preds.max(1).values > .7
    both = TensorDataset(torch.cat([x[:n_label], rest[sure]]), torch.cat([y[:n_label], preds.argmax(1)[sure]]))
    learn.dls = DataLoaders.from_dsets(both, valid, bs=32, val_bs=100, shuffle=True, num_workers=0, drop_last=True, device=learn.dls.device)
    learn.remove_cb(FixMatch)
    learn.fit_one_cycle(2 if small else 4, 5e-3)
    losses.append(learn.recorder.losses)
    return dict(metric=float(learn.recorder.values[-1][2]), fixmatch=first_score, kept=kept, losses=losses, learn=learn)
