"Settings that a loss reads, wherever they are: objects, containers, enclosing scopes, and arrays and tensors on the host"
import contextvars, dataclasses, enum, itertools, operator
from collections import ChainMap, defaultdict, deque, namedtuple
from .base import *
from .losses import within

@scenario
def settings_behind_getattr():
    class Config:
        def __init__(self): self.__dict__['_d'] = dict(smooth=0.)
        def __getattr__(self, k):
            try: return self.__dict__['_d'][k]
            except KeyError: raise AttributeError(k)
    conf = Config()
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=conf.smooth),
                   cbs=within(lambda l, i: conf._d.update(smooth=.02*i)))

@scenario
def settings_in_slots():
    class Config: __slots__ = 'smooth'
    conf = Config()
    conf.smooth = 0.
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=conf.smooth),
                   cbs=within(lambda l, i: setattr(conf, 'smooth', .02*i)))

@scenario
def settings_in_a_json_dict():
    conf = dict(loss=dict(smooth=0., weights=[1., 1.]))
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=conf['loss']['smooth'])*conf['loss']['weights'][1],
                   cbs=within(lambda l, i: conf['loss'].update(smooth=.02*i, weights=[1., .1*i])))

@scenario
def settings_in_a_chain_map():
    over,base = {},dict(smooth=0.)
    conf = ChainMap(over, base)
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=conf['smooth']),
                   cbs=within(lambda l, i: over.update(smooth=.02*i)))

class Mode(enum.Enum): plain,smooth = 0,1
@scenario
def an_enum():
    mode = [Mode.plain]
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=.2 if mode[0] is Mode.smooth else 0.),
                   cbs=within(lambda l, i: mode.__setitem__(0, Mode.smooth)))

class Confs: smooth = 0.
@scenario
def a_class_attribute():
    Confs.smooth = 0.
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=Confs.smooth),
                   cbs=within(lambda l, i: setattr(Confs, 'smooth', .02*i)))

smooth_var = contextvars.ContextVar('smooth')
@scenario
def a_context_variable():
    smooth_var.set(0.)
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=smooth_var.get()),
                   cbs=within(lambda l, i: smooth_var.set(.02*i)))

@scenario
def a_generator_of_weights():
    ws = itertools.cycle([1., .5, .25])
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t)*next(ws))

@scenario
def a_deque_of_losses():
    seen = deque([1.]*3, maxlen=3)
    def change(l, i): seen.append(1+.1*i)
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t)*(sum(seen)/3), cbs=within(change, *range(20)))

@scenario
def a_named_tuple_replaced():
    Conf = namedtuple('Conf', 'smooth')
    class C: conf = Conf(0.)
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=C.conf.smooth),
                   cbs=within(lambda l, i: setattr(C, 'conf', C.conf._replace(smooth=.02*i))))

@scenario
def a_bound_method_of_a_schedule():
    class Sched:
        def __init__(self): self._t = 0
        def step(self): self._t += 1
        def value(self): return 1/(1+self._t)
    s = Sched()
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t)*s.value(), cbs=within(lambda l, i: s.step()))

@scenario
def attribute_by_an_f_string():
    class Named:
        def __init__(self): self.w_a,self.w_b,self.n = np.ones(4, 'float32'),np.ones(4, 'float32'),'a'
        def __call__(self, pred, targ):
            return F.cross_entropy(pred, targ, weight=torch.from_numpy(getattr(self, f'w_{self.n}')).to(pred.device))
    def change(l, i): l.loss_func.w_a[1] = .1*i
    return learner(loss_func=Named(), cbs=within(change))

@scenario
def attribute_by_vars():
    class Named:
        def __init__(self): self.w_a,self.w_b = np.ones(4, 'float32'),np.ones(4, 'float32')
        def __call__(self, pred, targ):
            ws = [torch.from_numpy(v).to(pred.device) for k,v in vars(self).items() if k.startswith('w_')]
            return sum(F.cross_entropy(pred, targ, weight=w) for w in ws)
    def change(l, i): l.loss_func.w_a[1] = .1*i
    return learner(loss_func=Named(), cbs=within(change))

@scenario
def attrgetter():
    class Conf: pass
    conf = Conf(); conf.loss = Conf(); conf.loss.smooth = 0.
    get = operator.attrgetter('loss.smooth')
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=get(conf)),
                   cbs=within(lambda l, i: setattr(conf.loss, 'smooth', .02*i)))

# Tensors and arrays on the host

def weighted(w): return lambda p, t: F.cross_entropy(p, t, weight=w.to(p.device))

@scenario
def host_tensor_through_data():
    w = torch.ones(4)
    return learner(loss_func=weighted(w), cbs=within(lambda l, i: w.data.__setitem__(1, .1*i)))

@scenario
def host_tensor_from_numpy():
    a = np.ones(4, 'float32')
    w = torch.from_numpy(a)
    return learner(loss_func=weighted(w), cbs=within(lambda l, i: a.__setitem__(1, .1*i)))

@scenario
def host_tensor_attribute_through_data():
    class Weighted:
        def __init__(self): self.w = torch.ones(4)
        def __call__(self, pred, targ): return F.cross_entropy(pred, targ, weight=self.w.to(pred.device))
    return learner(loss_func=Weighted(), cbs=within(lambda l, i: l.loss_func.w.data.__setitem__(1, .1*i)))

@scenario
def host_tensor_of_a_layer_through_data():
    class Shifts(nn.Module):
        def __init__(self): 
            super().__init__()
            self.shift = torch.zeros(8)
        def forward(self, x): return x + self.shift.to(x.device)
    return learner(mlp(Shifts()), cbs=within(lambda l, i: l.model[2].shift.data.__setitem__(1, .1*i)))

@scenario
def big_host_tensor():
    a = torch.ones(4, 300_000)
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, weight=a[:,7].to(p.device)),
                   cbs=within(lambda l, i: a.data.__setitem__((1, 7), .1*i)))

@scenario
def array_of_objects():
    a = np.array([None, dict(smooth=0.)], dtype=object)
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=a[1]['smooth']),
                   cbs=within(lambda l, i: a[1].update(smooth=.02*i)))

@scenario
def long_list():
    ws = [1.]*2000
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t)*ws[1500], cbs=within(lambda l, i: ws.__setitem__(1500, .1*i)))

@scenario
def a_data_frame():
    df = pd.DataFrame(dict(w=[1.]*4))
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, weight=torch.tensor(df.w.values.astype('float32')).to(p.device)),
                   cbs=within(lambda l, i: df.__setitem__('w', [1., .1*i, 1., 1.])))
