"A small student learns from a large teacher: its softened probabilities, and where its features are strong, seen through hooks"
from sklearn.datasets import load_digits
from fastai.vision.all import *
from fastai_xla.all import *

def soft_distance(pred, teacher, heat=4.):
    "Kullback and Leibler's, of logits at a temperature; its gradient does not shrink with it"
    mine,its = ((o/heat).log_softmax(1) for o in (pred, teacher))
    return heat**2*(its.exp()*(its-mine)).sum(1).mean()

def strength(maps):
    "How much goes on at each place, as a part of the whole image"
    power = maps.square().sum(1).flatten(1)
    return power/power.sum(1, keepdim=True)

class LearnFrom(Callback):
    "A third of the loss is of the labels, a third of the teacher's answers, a third of its features"
    def __init__(self, teacher, layer): store_attr()
    def before_fit(self):
        self.seen = []
        def remember(module, inp, out): self.seen.append(strength(out))
        self.hooks = [m.get_submodule(self.layer).register_forward_hook(remember) for m in (self.model, self.teacher)]
        self.teacher.eval()
    def before_batch(self): self.seen.clear()
    def after_loss(self):
        with torch.no_grad(): answers = self.teacher(self.x)
        mine,its = self.seen
        total = self.learn.loss_grad + soft_distance(self.pred, answers) + 100*F.mse_loss(mine, its)
        self.learn.loss_grad = total/3
        self.learn.loss = self.learn.loss_grad.clone()
    def after_fit(self): L(self.hooks).map(Self.remove())

class Net(Module):
    def __init__(self, nf):
        self.low,self.high = ConvLayer(1, nf),ConvLayer(nf, 2*nf, stride=2)
        self.out = nn.Sequential(nn.AdaptiveAvgPool2d(2), Flatten(), nn.Linear(8*nf, 10))
    def forward(self, x): return self.out(self.high(self.low(x)))

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (500, 3) if small else (1797, 4)
    digits = load_digits()
    x,y = TensorImageBW(torch.tensor(digits.images[:n], dtype=torch.float)[:,None]/16),TensorCategory(digits.target[:n])
    dsets = Datasets(range(n), [[x.__getitem__], [y.__getitem__]], splits=RandomSplitter(.2, seed=seed)(range(n)))
    dls = dsets.dataloaders(bs=32, num_workers=0)
    def learner(nf, **kwargs): return Learner(dls, Net(nf), loss_func=CrossEntropyLossFlat(), metrics=accuracy, **kwargs)
    teacher = learner(16)
    if xla: teacher.to_xla()
    teacher.fit_one_cycle(epochs, 2e-2)
    student = learner(3, cbs=LearnFrom(teacher.model, 'high'))
    if xla: student.to_xla()
    student.fit_one_cycle(2*epochs, 2e-2)
    final,losses = float(student.recorder.values[-1][2]),[o.recorder.losses for o in (teacher, student)]
    return dict(metric=final, teacher=float(teacher.validate()[1]), losses=losses, learn=student, others=[teacher])
