"Losses: numbers of the learner that containers and C code consume, modules and settings that a loss holds"
import contextvars, dataclasses, enum, functools, itertools, math, operator
from collections import ChainMap, defaultdict, deque, namedtuple
from math import cos
from .base import *

class Loss:
    "A loss that knows its learner"
    def __init__(self, f): self.f = f
    def __call__(self, pred, targ): return self.f(self, self.learn, F.cross_entropy(pred, targ))

weights_by_epoch = [1., .5, .25, 2.]
by_epoch = dict(
    a_list=lambda o, learn, l: l*weights_by_epoch[learn.epoch],
    a_tuple=lambda o, learn, l: l*(1., .5, .25, 2.)[learn.epoch],
    a_dict=lambda o, learn, l: l*{0: 1., 1: .5, 2: .25, 3: 2.}[learn.epoch],
    an_array=lambda o, learn, l: l*float(np.array(weights_by_epoch)[learn.epoch]),
    a_tensor=lambda o, learn, l: l*torch.linspace(1, .1, 4)[learn.epoch].item(),
    np_interp=lambda o, learn, l: l*float(np.interp(learn.epoch, [0, 3], [.5, 1.])),
    np_interp_flat=lambda o, learn, l: l*float(np.interp(learn.epoch, [1, 3], [1., .5])),
    np_cos=lambda o, learn, l: l*float(1+np.cos(learn.epoch)),
    np_clip=lambda o, learn, l: l*float(np.clip(learn.epoch/2, .25, 1.)),
    np_where=lambda o, learn, l: l*float(np.where(learn.epoch > 1, .5, 1.)),
    math_cos=lambda o, learn, l: l*(1+cos(learn.epoch)),
    math_floor=lambda o, learn, l: l*math.floor(1+learn.epoch/2),
    math_ceil=lambda o, learn, l: l*math.ceil(1+learn.epoch/2),
    math_fsum=lambda o, learn, l: l*math.fsum([1, learn.epoch]),
    math_isclose=lambda o, learn, l: l*(.5 if math.isclose(learn.epoch, 2.) else 1.),
    math_hypot=lambda o, learn, l: l*math.hypot(1., learn.epoch),
    math_atan=lambda o, learn, l: l*(1+math.atan(learn.epoch)),
    as_float=lambda o, learn, l: l*(1+float(learn.epoch)),
    as_int=lambda o, learn, l: l*(1+int(learn.pct_train*4)),
    a_bit=lambda o, learn, l: l*(2. if learn.epoch & 1 else 1.),
    a_shift=lambda o, learn, l: l*(1 << learn.epoch),
    an_xor=lambda o, learn, l: l*(1 + (learn.epoch ^ 1)),
    a_range=lambda o, learn, l: l*(1+sum(.1*i for i in range(learn.epoch))),
    a_loop=lambda o, learn, l: functools.reduce(lambda a, _: a*.9, range(learn.epoch), l),
    a_slice=lambda o, learn, l: l*(1+sum(weights_by_epoch[:learn.epoch])),
    repeated=lambda o, learn, l: l*(1+sum([.1]*learn.epoch)),
    islice=lambda o, learn, l: l*(1+sum(itertools.islice([.1]*4, learn.epoch))),
    itemgetter=lambda o, learn, l: l*operator.itemgetter(learn.epoch)(weights_by_epoch),
    a_set=lambda o, learn, l: l*(.5 if learn.epoch in {1, 3} else 1.),
    as_str=lambda o, learn, l: l*(1+len(str(10**learn.epoch))),
    an_fstring=lambda o, learn, l: l*dict(e0=1., e1=.5, e2=.25, e3=2.)[f'e{learn.epoch}'],
    a_percent=lambda o, learn, l: l*dict(e0=1., e1=.5, e2=.25, e3=2.)['e%d' % learn.epoch],
    a_match=lambda o, learn, l: l*(.5 if (learn.epoch, True) == (2, True) else 1.),
    minimum=lambda o, learn, l: l*max(.1, 1-.4*learn.epoch),
    ramp_from_one=lambda o, learn, l: l*(1-.2*learn.epoch),
    ramp_from_zero=lambda o, learn, l: l+l*learn.epoch,
    ramp_by_batch=lambda o, learn, l: l*(1+.1*learn.train_iter) if learn.training else l,
    power=lambda o, learn, l: l*.9**learn.epoch,
    tensor_power=lambda o, learn, l: l**learn.epoch,
    tensor_of=lambda o, learn, l: l*torch.tensor(1.+learn.epoch),
    full=lambda o, learn, l: l*torch.full((), 1.+learn.epoch, device=l.device),
    as_tensor=lambda o, learn, l: l*torch.as_tensor([1.+learn.epoch]*2).sum().item(),
    np_float=lambda o, learn, l: l*np.float32(1+learn.epoch),
    sqrt=lambda o, learn, l: l*math.sqrt(1+learn.epoch),
    log1p=lambda o, learn, l: l*math.log1p(learn.epoch),
    dropout_p=lambda o, learn, l: l*F.dropout(torch.ones(4), p=min(.9, .3*learn.epoch), training=False).sum().item(),
    clamp=lambda o, learn, l: l.clamp(max=2-.4*learn.epoch),
    divmod_=lambda o, learn, l: l*(1+divmod(learn.epoch, 2)[1]),
    complex_=lambda o, learn, l: l*abs(complex(1, learn.epoch)),
    round_=lambda o, learn, l: l*(1+round(learn.epoch*.7)),
    as_bool=lambda o, learn, l: l*(1+bool(learn.epoch)),
    sorted_=lambda o, learn, l: l*(1+sorted([2, learn.epoch])[0]),
    sum_=lambda o, learn, l: l*(1+sum([learn.epoch, .5])),
    hex_=lambda o, learn, l: l*(1+int(hex(learn.epoch), 16)),
    bit_length=lambda o, learn, l: l*(1+learn.epoch.bit_length()),
    is_integer=lambda o, learn, l: l*(2. if float(learn.epoch/2).is_integer() else 1.),
    of_hypers=lambda o, learn, l: l*(1+cos(100*learn.opt.hypers[-1]['lr'])) if learn.opt else l)

def _by_epoch(f): return lambda: of_loss(Loss(f))
for _n,_f in by_epoch.items(): scenarios[f'epoch_{_n}'] = SimpleNamespace(make=_by_epoch(_f), fit=fits, seen=nothing, cpu=True, to={}, refused='', tol=0, beside='', file=__name__)

# Numbers of the learner's batches

@scenario
def weight_of_each_batch_from_a_list():
    ws = [1+.1*i for i in range(5)]
    return of_loss(Loss(lambda o, learn, l: l*ws[learn.iter % 5]))

@scenario
def weight_in_later_batches_of_an_epoch_from_a_list():
    return of_loss(Loss(lambda o, learn, l: l*[1., .5][learn.train_iter > 11]))

@scenario
def weight_from_a_list_by_third_batches():
    return of_loss(Loss(lambda o, learn, l: l*weights_by_epoch[learn.train_iter//7]))

@scenario
def warm_up_by_np_interp_over_batches():
    return of_loss(Loss(lambda o, learn, l: l*float(np.interp(learn.train_iter, [3, 15], [1., .2]))))

@scenario
def warm_up_by_cos_over_pct_train():
    return of_loss(Loss(lambda o, learn, l: l*(1+cos(learn.pct_train)) if learn.training else l))

# What a loss holds

def changes(f, *epochs):
    "A callback that does `f(learn, epoch)` before some epochs"
    class Changes(Callback):
        def before_epoch(self):
            if self.epoch in (epochs or (1, 2, 3)): f(self.learn, self.epoch)
    return Changes()

def within(f, *batches):
    "A callback that does `f(learn, train_iter)` after some batches"
    class Within(Callback):
        def after_batch(self):
            if self.training and self.train_iter in (batches or (3, 12)): f(self.learn, self.train_iter)
    return Within()

class Holds:
    "A loss with a module in it"
    def __init__(self, ce=None): self.ce = ce or nn.CrossEntropyLoss()
    def __call__(self, pred, targ): return self.ce(pred, targ)

@scenario
def label_smoothing_of_a_held_module():
    return learner(loss_func=Holds(), cbs=within(lambda l, i: setattr(l.loss_func.ce, 'label_smoothing', .02*i)))

@scenario
def label_smoothing_of_a_module_in_a_list():
    class Several(Holds):
        def __call__(self, pred, targ): return sum(f(pred, targ) for f in self.ce)
    return learner(loss_func=Several([nn.CrossEntropyLoss(), nn.MultiMarginLoss()]),
                   cbs=within(lambda l, i: setattr(l.loss_func.ce[0], 'label_smoothing', .02*i)))

@scenario
def margin_of_a_module_in_a_dict():
    class Several(Holds):
        def __call__(self, pred, targ): return sum(f(pred, targ) for f in self.ce.values())
    return learner(loss_func=Several(dict(a=nn.CrossEntropyLoss(), b=nn.MultiMarginLoss())),
                   cbs=within(lambda l, i: setattr(l.loss_func.ce['b'], 'margin', .1*i)))

@scenario
def gamma_of_a_focal_loss():
    return learner(loss_func=FocalLossFlat(), cbs=within(lambda l, i: setattr(l.loss_func.func, 'gamma', .5*i)))

@scenario
def gamma_of_a_held_focal_loss():
    return learner(loss_func=Holds(FocalLossFlat()), cbs=within(lambda l, i: setattr(l.loss_func.ce.func, 'gamma', .5*i)))

@scenario
def class_weights_of_a_held_module():
    def change(l, i): l.loss_func.ce.weight = torch.tensor([1., 2., .5, 1.], device=l.model[1].weight.device)
    return learner(loss_func=Holds(), cbs=within(change, 6))

@scenario
def beta_of_smooth_l1():
    class Reg(Holds):
        def __call__(self, pred, targ): return self.ce(pred, F.one_hot(targ, 4).float())
    return learner(loss_func=Reg(nn.SmoothL1Loss()), metrics=[], cbs=within(lambda l, i: setattr(l.loss_func.ce, 'beta', .1*i)))

@scenario
def reduction_of_a_held_module():
    def loss(pred, targ): return ce(pred, targ).sum()/8
    ce = nn.CrossEntropyLoss()
    return learner(loss_func=loss, cbs=within(lambda l, i: setattr(ce, 'reduction', 'sum'), 6))

@scenario
def module_in_a_closure():
    ce = nn.CrossEntropyLoss()
    return learner(loss_func=lambda p, t: ce(p, t), cbs=within(lambda l, i: setattr(ce, 'label_smoothing', .02*i)))

global_ce = nn.CrossEntropyLoss()
@scenario
def module_in_a_global():
    global_ce.label_smoothing = 0.
    return learner(loss_func=lambda p, t: global_ce(p, t), cbs=within(lambda l, i: setattr(global_ce, 'label_smoothing', .02*i)))

@scenario
def module_in_a_partial():
    def loss(pred, targ, ce): return ce(pred, targ)
    ce = nn.CrossEntropyLoss()
    return learner(loss_func=partial(loss, ce=ce), cbs=within(lambda l, i: setattr(ce, 'label_smoothing', .02*i)))

@scenario
def module_as_a_default_argument():
    ce = nn.CrossEntropyLoss()
    def loss(pred, targ, ce=ce): return ce(pred, targ)
    return learner(loss_func=loss, cbs=within(lambda l, i: setattr(ce, 'label_smoothing', .02*i)))

@scenario
def module_in_a_simple_namespace():
    class Several(Holds):
        def __call__(self, pred, targ): return self.ce.first(pred, targ)
    return learner(loss_func=Several(SimpleNamespace(first=nn.CrossEntropyLoss())),
                   cbs=within(lambda l, i: setattr(l.loss_func.ce.first, 'label_smoothing', .02*i)))

@scenario
def module_behind_a_property():
    class Behind(Holds):
        @property
        def fn(self): return self.__dict__['ce']
        def __call__(self, pred, targ): return self.fn(pred, targ)
    return learner(loss_func=Behind(), cbs=within(lambda l, i: setattr(l.loss_func.ce, 'label_smoothing', .02*i)))

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
def settings_in_a_dataclass():
    @dataclasses.dataclass
    class Config: smooth: float = 0.
    conf = Config()
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

@scenario
def settings_in_a_defaultdict():
    conf = defaultdict(float)
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=conf['smooth']),
                   cbs=within(lambda l, i: conf.update(smooth=.02*i)))

@scenario
def settings_in_an_attr_dict():
    conf = AttrDict(smooth=0.)
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=conf.smooth),
                   cbs=within(lambda l, i: conf.update(smooth=.02*i)))

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
def an_environment_variable():
    os.environ['SMOOTH'] = '0'
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=float(os.environ['SMOOTH'])),
                   cbs=within(lambda l, i: os.environ.update(SMOOTH=str(.02*i))))

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
def a_mapping_proxy():
    d = dict(smooth=0.)
    from types import MappingProxyType
    conf = MappingProxyType(d)
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=conf['smooth']),
                   cbs=within(lambda l, i: d.update(smooth=.02*i)))

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
def nested_objects():
    class A: pass
    a = A(); a.b = A(); a.b.c = A(); a.b.c.smooth = 0.
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, label_smoothing=a.b.c.smooth),
                   cbs=within(lambda l, i: setattr(a.b.c, 'smooth', .02*i)))

@scenario
def attribute_by_an_f_string():
    class Named:
        def __init__(self): self.w_a,self.w_b,self.n = np.ones(4, 'float32'),np.ones(4, 'float32'),'a'
        def __call__(self, pred, targ): return F.cross_entropy(pred, targ, weight=torch.from_numpy(getattr(self, f'w_{self.n}')).to(pred.device))
    def change(l, i): l.loss_func.w_a[1] = .1*i
    return learner(loss_func=Named(), cbs=within(change))

@scenario
def attribute_by_vars():
    class Named:
        def __init__(self): self.w_a,self.w_b = np.ones(4, 'float32'),np.ones(4, 'float32')
        def __call__(self, pred, targ):
            return sum(F.cross_entropy(pred, targ, weight=torch.from_numpy(v).to(pred.device)) for k,v in vars(self).items() if k.startswith('w_'))
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
def host_tensor_through_numpy():
    w = torch.ones(4)
    return learner(loss_func=weighted(w), cbs=within(lambda l, i: w.numpy().__setitem__(1, .1*i)))

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
def big_array():
    a = np.ones((4, 300_000), 'float32')
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t, weight=torch.from_numpy(a[:,7]).to(p.device)),
                   cbs=within(lambda l, i: a.__setitem__((1, 7), .1*i)))

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

@scenario
def memory_view():
    import array
    a = array.array('f', [1.]*4)
    return learner(loss_func=lambda p, t: F.cross_entropy(p, t)*a[1], cbs=within(lambda l, i: a.__setitem__(1, .1*i)))
