"A small student learns from a large teacher: soft targets at a temperature, and the teacher's features through hooks"
from sklearn.datasets import load_digits
from fastai.vision.all import *
from fastai_xla.all import *

def soft_loss(student, teacher, temp=4.):
    "How far the student's softened probabilities are from the teacher's"
    student,teacher = (F.log_softmax(o/temp, -1) for o in (student, teacher))
    return temp**2*F.kl_div(student, teacher, reduction='batchmean', log_target=True)

def where_active(acts):
    "The energy of the channels at each place, as a unit vector per image"
    return F.normalize((acts**2).mean(1).flatten(1))

def attention_loss(students, teachers):
    return sum(F.mse_loss(where_active(students[s]), where_active(teachers[t])) for s,t in zip(students, teachers))

class KnowledgeDistillation(Callback):
    def __init__(self, teacher, pairs, weight=.7):
        store_attr()
        self.fm_s,self.fm_t = {},{}
    def keep(self, store, name):
        def hook(module, inp, out): store[name] = out
        return hook
    def before_fit(self):
        self.handles = []
        for s,t in self.pairs:
            self.handles.append(get_module(self.learn.model, s).register_forward_hook(self.keep(self.fm_s, s)))
            self.handles.append(get_module(self.teacher, t).register_forward_hook(self.keep(self.fm_t, t)))
        self.teacher.eval()
    def after_loss(self):
        with torch.no_grad(): teacher_pred = self.teacher(self.x)
        soft = soft_loss(self.pred, teacher_pred) + 10*attention_loss(self.fm_s, self.fm_t)
        self.learn.loss_grad = torch.lerp(self.learn.loss_grad, soft, self.weight)
        self.learn.loss = self.learn.loss_grad.clone()
    def after_fit(self):
        for h in self.handles: h.remove()

def get_module(m, path): return reduce(getattr, path.split('.'), m)

def net(nf): return nn.Sequential(OrderedDict(body=nn.Sequential(OrderedDict(first=ConvLayer(1, nf), second=ConvLayer(nf, 2*nf, stride=2))),
    head=nn.Sequential(nn.AdaptiveAvgPool2d(2), Flatten(), nn.Linear(8*nf, 10))))

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs = (500, 3) if small else (1797, 4)
    digits = load_digits()
    x,y = TensorImageBW(torch.tensor(digits.images[:n], dtype=torch.float)[:,None]/16),TensorCategory(digits.target[:n])
    dsets = Datasets(range(n), [[x.__getitem__], [y.__getitem__]], splits=RandomSplitter(.2, seed=seed)(range(n)))
    dls = dsets.dataloaders(bs=32, num_workers=0)
    teacher = Learner(dls, net(16), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    if xla: teacher.to_xla()
    teacher.fit_one_cycle(epochs, 2e-2)
    distil = KnowledgeDistillation(teacher.model, [('body.second', 'body.second')])
    student = Learner(dls, net(3), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=distil)
    if xla: student.to_xla()
    student.fit_one_cycle(2*epochs, 2e-2)
    losses = [float(l) for o in (teacher, student) for l in o.recorder.losses]
    final = float(student.recorder.values[-1][2])
    return dict(metric=final, teacher=float(teacher.validate()[1]), losses=losses, learn=student, others=[teacher])
