"What packages and notebooks of others were found to stumble on: replayed as retraced, and as on the CPU"
from fastai.vision.models.unet import DynamicUnet
from by_log import *
from test_kinds_of_code import Net, hooked, net

stories = {}
def story(f):
    stories[f.__name__] = f
    return f

class Wide(nn.Module):
    "Layers of other widths; each result gets an attribute for a while, so that another tensor stands for it in the next step"
    widths = 6,16,5,9,12,7,1
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i,o in zip(self.widths, self.widths[1:]))
    def forward(self, x):
        for i,l in enumerate(self.layers):
            x = l(x).tanh()
            x.of = i
            if x.shape[-1] != self.widths[i+1]: raise ValueError(f'layer {i} gives {tuple(x.shape)}')
        return x

@story
def attributes_on_results(): return dict(model=Wide)

@story
def a_view_made_without_gradients_of_what_changes_in_place():
    def after_step(cb):
        with torch.no_grad():
            w = cb.model.a.weight
            n = w.view(w.shape[0], -1).norm(dim=1)
            w.mul_((1/n.clamp(min=1.))[:,None])
    return net(lambda s,x: s.b(x.relu())) | hooked(after_step=after_step)

@story
def weights_are_set_to_other_tensors():
    def after_step(cb):
        with torch.no_grad():
            for p in cb.model.parameters(): p.set_(p.clone()*.99)
    return net(lambda s,x: s.b(x.relu())) | hooked(after_step=after_step)

class Token(nn.Module):
    "A parameter goes into a layer norm without an operator before it: its mean must not be another graph once a program has made it"
    def __init__(self):
        super().__init__()
        self.token,self.norm,self.a,self.b = nn.Parameter(torch.randn(1, 1, 8)),nn.LayerNorm(8),nn.Linear(6, 8),nn.Linear(8, 1)
    def forward(self, x):
        t = self.token.reshape(1, 8)[None].expand(len(x), -1, -1).reshape(len(x), 1, 8)
        return self.b(self.norm(t)[:,0] + self.a(x))

@story
def a_token_into_a_layer_norm(): return dict(model=Token)

@story
def a_row_without_gradients_is_kept():
    def after_step(cb):
        with torch.no_grad():
            cb.row = cb.model.a.weight[0]
            cb.model.a.weight.clamp_(-.3, .3)
    return net(lambda s,x: s.b(x.relu())) | hooked(after_step=after_step)

def weights_by(dtype):
    "Weights of samples, found by arrays of small ints"
    def before_fit(cb): cb.ws = torch.linspace(.1, 2, 64).to(cb.dls.device)
    def after_pred(cb):
        at = np.arange(len(cb.x)) + cb.iter
        cb.learn.pred = cb.pred*cb.ws[list(at.astype(np.int16)) if dtype is list else at.astype(dtype)][:,None]
    return hooked(before_fit=before_fit, after_pred=after_pred)

for _dtype in (np.int8, np.uint16, np.float32, list):
    stories[f'weights_by_{_dtype.__name__}'] = partial(weights_by, _dtype)

@story
def online_sample_mining():
    "The largest losses of a batch are left out"
    def loss(p, t):
        losses = F.mse_loss(p, t, reduction='none').flatten()
        return losses.index_select(0, losses.topk(len(losses)-2, largest=False)[1]).mean()
    return net(lambda s,x: s.b(x.relu())) | dict(loss_func=lambda: loss)

@story
def distances_by_addmm():
    class Centers(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
        def forward(self, p, t):
            x = torch.cat([p, p*t, t], 1)
            d = x.pow(2).sum(1, keepdim=True) + self.centers.pow(2).sum(1)
            return F.mse_loss(p, t) + .1*torch.addmm(d, x, self.centers.T, beta=1, alpha=-2).clamp(1e-12, 1e12).amin(1).mean()
    return net(lambda s,x: s.b(x.relu())) | dict(loss_func=Centers)

@story
def pairs_without_an_item_itself():
    def loss(p, t):
        d = (p-p.T).abs()
        d.fill_diagonal_(9.)
        return F.mse_loss(p, t) + .01*d.amin(1).mean() + p.mean().sum(0)*0
    return net(lambda s,x: s.b(x.relu())) | dict(loss_func=lambda: loss)

@story
def numbers_into_a_mask():
    def forward(s, x):
        y = x*2
        y[x > .5] = .5
        return s.b(y.relu())
    return net(forward)

@story
def inference_mode():
    "As `get_stats` of segmentation_models_pytorch"
    @torch.inference_mode()
    def after_loss(cb): cb.n = getattr(cb, 'n', 0) + (cb.pred.view(-1)[1:] > 0).sum()
    return net(lambda s,x: s.b(x.relu())) | hooked(after_loss=after_loss)

@story
def lines_of_text():
    "Each of six steps gives a character; how many there are comes with the batch, and how many steps from the host"
    def loss(p, t):
        characters,n = (t*10).long()%3 + 1,(t[:,0] > 0).long()
        return F.ctc_loss(p, characters.expand(-1, 2), torch.full((len(t),), len(p)), n+1, zero_infinity=True)
    return net(lambda s,x: (x.T[...,None]*s.a.weight[:,0] + s.b.bias).log_softmax(-1)) | dict(loss_func=lambda: loss)

kept = {'a_row_without_gradients_is_kept'}   # an alias of a parameter, which is retraced
@pytest.mark.parametrize('name', stories)
def test_as_retraced_and_as_on_the_cpu(name):
    learn = agree(stories[name], branches=None, tol=1e-6, n=2)
    assert name in kept or counts(learn)[True]['replayed'] >= 12
    if name == 'attributes_on_results': check_who_is_asked(learn)

def check_who_is_asked(learn):
    "No tensor that is gone: another one may get its id, and would have its shape"
    log,there,todo = learn.xla_opt.replay.by_log.logs[True],set(),[]
    todo += log.root.kids
    while todo:
        n = todo.pop()
        there |= set(map(id, n.held or ()))
        todo += n.kids
    assert log.asked and log.asked.keys() <= there

def test_a_kernel_that_is_missing_is_named():
    def forward(s, x): return s.b(x.relu())*torch.special.bessel_j0(x[:,:1])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn = run(lambda: net(forward), 'auto', n=2)[1]
    why = learn.xla_opt.replay.reasons.why
    assert any(k.startswith('torch.special.bessel_j0 at') and 'aten::special_bessel_j0 on the CPU' in k for k in why)

def test_unet_with_a_loss_of_the_users():
    "Its blocks read what hooks on the encoder have stored, and its last layer an attribute of what it is given"
    def loss(p, t): return F.cross_entropy(p, t) + .1*(1-p.softmax(1)[:,1].mean())
    def fit(xla):
        set_seed(1)
        x = torch.randn(24, 3, 16, 16)
        ds = list(zip(map(TensorImage, x), map(TensorMask, (x[:,0] > 0).long())))
        encoder = nn.Sequential(ConvLayer(3, 4, stride=2), ConvLayer(4, 4, stride=2))
        dls = DataLoaders.from_dsets(ds[:16], ds[16:], bs=4, shuffle=False, num_workers=0)
        learn = Learner(dls, DynamicUnet(encoder, 2, (16, 16)), loss_func=loss, opt_func=SGD, metrics=foreground_acc)
        if xla: learn.to_xla()
        with learn.no_bar(), learn.no_logging():
            learn.fit(2, 1e-2)
            learn.fit(1, 1e-2)
        return tensor(learn.recorder.losses),tensor([[float(o) for o in v] for v in learn.recorder.values]),learn
    losses,values,_ = fit(False)
    losses1,values1,learn = fit(True)
    torch.testing.assert_close(losses1, losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values1, values, rtol=1e-3, atol=1e-4)
    assert counts(learn)[True]['replayed'] == 4
