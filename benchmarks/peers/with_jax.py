"""The same networks and the same arithmetic in JAX, one jitted step with its state donated: the limit on this compiler

`jax` keeps images as PyTorch does, channels first, so that the programs are the same;
`jax_nhwc` keeps them channels last, as XLA likes better."""
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from .clock import Clock, Missing
from .data import make_data

layout = 'NCHW'

# Layers: parameters in `p`, running statistics in `s`, both by name; new statistics go into `new`

def conv_init(g, ni, nf, k): return (g.standard_normal((nf, ni, k, k))*(2/(ni*k*k))**.5).astype(np.float32)
def conv(w, x, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), [(w.shape[2]//2,)*2]*2, dimension_numbers=(layout, 'OIHW', layout))

def rows_cols(): return layout.index('H'), layout.index('W')
def wide(v): return v[:,None,None] if layout == 'NCHW' else v

def bn_init(p, s, name, nf):
    p[f'{name}.w'],p[f'{name}.b'] = np.ones(nf, np.float32),np.zeros(nf, np.float32)
    s[f'{name}.mean'],s[f'{name}.var'] = np.zeros(nf, np.float32),np.ones(nf, np.float32)

def bn(p, s, new, name, x, train):
    "nn.BatchNorm2d: normalise with the biased variance, remember the unbiased one"
    m,v = s[f'{name}.mean'],s[f'{name}.var']
    if train:
        dims,n = (0,*rows_cols()),x.size//m.size
        m,v = x.mean(dims),x.var(dims)
        new[f'{name}.mean'] = .9*s[f'{name}.mean']+.1*lax.stop_gradient(m)
        new[f'{name}.var'] = .9*s[f'{name}.var']+.1*lax.stop_gradient(v)*n/(n-1)
    scale = p[f'{name}.w']*lax.rsqrt(v+1e-5)
    return x*wide(scale) + wide(p[f'{name}.b']-m*scale)

def linear_init(p, g, name, ni, nf):
    p[f'{name}.w'] = (g.uniform(-1, 1, (ni, nf))*ni**-.5).astype(np.float32)
    p[f'{name}.b'] = (g.uniform(-1, 1, nf)*ni**-.5).astype(np.float32)
def linear(p, name, x): return x@p[f'{name}.w']+p[f'{name}.b']

# Networks: a list of (name, input channels, channels, kernel, stride) makes parameters; a function applies them

def convnet_layers(): return [('c0', 1, 32, 3, 2), ('c1', 32, 64, 3, 2), ('c2', 64, 128, 3, 2)], 128

def convnet(p, s, x, train):
    new = {}
    for name,_,_,_,stride in convnet_layers()[0]: x = jax.nn.relu(bn(p, s, new, name, conv(p[f'{name}.k'], x, stride), train))
    return linear(p, 'fc', x.mean(rows_cols())), new

depths = dict(resnet18=((2,2,2,2),1), resnet34=((3,4,6,3),1), resnet50=((3,4,6,3),4))   # blocks, expansion

def blocks(name):
    "torchvision's residual blocks: (name, convolutions, shortcut or None)"
    counts,exp = depths[name]
    ni = 64
    for i,(n,nf) in enumerate(zip(counts, (64,128,256,512))):
        for j in range(n):
            stride,b = 2 if i and not j else 1, f'b{i}.{j}'
            cs = [(ni,nf,3,stride), (nf,nf,3,1)] if exp == 1 else [(ni,nf,1,1), (nf,nf,3,stride), (nf,nf*exp,1,1)]
            yield [(f'{b}.{k}', *c) for k,c in enumerate(cs)], (f'{b}.down', ni, nf*exp, 1, stride) if stride > 1 or ni != nf*exp else None
            ni = nf*exp

def resnet_layers(name):
    return [('stem', 3, 64, 7, 2)] + [c for cs,down in blocks(name) for c in (*cs, *([down] if down else []))], 512*depths[name][1]

def resnet(name, p, s, x, train):
    new = {}
    def norm_conv(c, x): return bn(p, s, new, c[0], conv(p[f'{c[0]}.k'], x, c[4]), train)
    x = jax.nn.relu(norm_conv(('stem', 3, 64, 7, 2), x))
    x = lax.reduce_window(x, -jnp.inf, lax.max, *zip(*[(3,2,(1,1)) if c in 'HW' else (1,1,(0,0)) for c in layout]))
    for cs,down in blocks(name):
        res = norm_conv(down, x) if down else x
        for c in cs[:-1]: x = jax.nn.relu(norm_conv(c, x))
        x = jax.nn.relu(norm_conv(cs[-1], x)+res)
    return linear(p, 'fc', x.mean(rows_cols())), new

def conv_params(layers, n_out=10):
    g,p,s = np.random.default_rng(0),{},{}
    for name,ni,nf,k,_ in layers[0]:
        p[f'{name}.k'] = conv_init(g, ni, nf, k)
        bn_init(p, s, name, nf)
    linear_init(p, g, 'fc', layers[1], n_out)
    return p, s

def norm(p, name, x):
    m,v = x.mean(-1, keepdims=True),x.var(-1, keepdims=True)
    return (x-m)*lax.rsqrt(v+1e-5)*p[f'{name}.w']+p[f'{name}.b']

def transformer(p, s, x, train, heads=4, layers=4):
    x = p['emb'][x]+p['pos']
    n,t,d = x.shape
    mask = jnp.tril(jnp.ones((t,t), bool))
    for i in range(layers):
        q,k,v = linear(p, f'{i}.qkv', norm(p, f'{i}.ln1', x)).reshape(n, t, 3, heads, d//heads).transpose(2, 0, 3, 1, 4)
        a = jax.nn.softmax(jnp.where(mask, q@k.swapaxes(2, 3)*(d//heads)**-.5, -jnp.inf))@v
        x = x + linear(p, f'{i}.out', a.swapaxes(1, 2).reshape(n, t, d))
        x = x + linear(p, f'{i}.down', jax.nn.gelu(linear(p, f'{i}.up', norm(p, f'{i}.ln2', x)), approximate=False))
    return linear(p, 'fc', norm(p, 'ln', x)), {}

def transformer_params(vocab=200, length=64, d=128, layers=4):
    g,p = np.random.default_rng(0),{}
    p['emb'],p['pos'] = g.standard_normal((vocab, d)).astype(np.float32),(g.standard_normal((length, d))*.02).astype(np.float32)
    for i in range(layers):
        for name,ni,nf in (('qkv',d,3*d), ('out',d,d), ('up',d,4*d), ('down',4*d,d)): linear_init(p, g, f'{i}.{name}', ni, nf)
    norms = [f'{i}.{o}' for i in range(layers) for o in ('ln1','ln2')] + ['ln']
    for name in norms: p[f'{name}.w'],p[f'{name}.b'] = np.ones(d, np.float32),np.zeros(d, np.float32)
    linear_init(p, g, 'fc', d, vocab)
    return p, {}

# Training

def tree_map(f, *ts): return jax.tree.map(f, *ts)

def sgd_init(p): return tree_map(np.zeros_like, p)
def sgd(p, g, o, lr):
    o = tree_map(lambda m,g: .9*m+g, o, g)
    return tree_map(lambda p,m: p-lr*m, p, o), o

def adamw_init(p): return (sgd_init(p), sgd_init(p), np.float32(0))
def adamw(p, g, o, lr):
    m,v,n = tree_map(lambda m,g: .9*m+.1*g, o[0], g),tree_map(lambda v,g: .99*v+.01*g*g, o[1], g),o[2]+1
    upd = lambda p,m,v: p*(1-lr*.01) - lr*(m/(1-.9**n))/(jnp.sqrt(v/(1-.99**n))+1e-5)
    return tree_map(upd, p, m, v), (m, v, n)

def cross_entropy(out, y): return -jnp.take_along_axis(jax.nn.log_softmax(out), y[...,None], -1).mean()

def make(name):
    "Apply function, parameters, statistics, optimizer's state and update"
    if name == 'transformer' and layout == 'NCHW': return transformer, *transformer_params(), adamw_init, partial(adamw, lr=1e-3)
    if name == 'convnet': return convnet, *conv_params(convnet_layers()), sgd_init, partial(sgd, lr=.05)
    if name in depths: return partial(resnet, name), *conv_params(resnet_layers(name)), sgd_init, partial(sgd, lr=.01)
    raise Missing(f'no {name} for it here')

def make_step(net, update):
    "Forward, backward, update: takes and returns parameters, statistics and optimizer's state, and returns the loss too"
    def step(state, x, y):
        p,s,o = state
        def loss_fn(p):
            out,new = net(p, s, x, True)
            return cross_entropy(out, y), new
        (loss,s),g = jax.value_and_grad(loss_fn, has_aux=True)(p)
        p,o = update(p, g, o)
        return (p, s, o), loss
    return step

compiled = []   # seconds of each compile
def on_duration(event, seconds, **kwargs):
    if event == '/jax/core/compile/backend_compile_duration': compiled.append(seconds)

def run(cfg):
    global layout
    (x,y),(vx,vy) = [(a[0], a[-1].astype(np.int32)) for a in make_data(cfg.model, cfg.bs, cfg.steps)]
    if x.dtype == np.int64: x,vx = x.astype(np.int32),vx.astype(np.int32)
    if cfg.peer == 'jax_nhwc': layout,x,vx = 'NHWC',*[np.moveaxis(o, 1, -1).copy() if o.ndim == 4 else o for o in (x, vx)]
    calls,sent,state = 0,0,None
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.devices()   # starts the client, which is no part of the first step
    def counts(): return dict(compiles=len(compiled), compile_s=sum(compiled), executions=calls, to_host=0, sent_kb=sent/1e3)
    clock = Clock(cfg, counts, lambda: jax.block_until_ready(state))
    try: net,p,s,opt_init,update = make(cfg.model)
    except Missing as e: return clock.tell(missing=str(e))
    state,step = jax.device_put((p, s, opt_init(p))),jax.jit(make_step(net, update), donate_argnums=0)
    g = np.random.default_rng(1)
    for _ in range(clock.epochs):
        clock.begin()
        order = g.permutation(len(x))
        for i in range(cfg.steps):
            idx = order[i*cfg.bs:(i+1)*cfg.bs]
            xb,yb = x[idx],y[idx]
            state,loss = step(state, xb, yb)
            calls,sent = calls+1,sent+xb.nbytes+yb.nbytes
            clock.step()
        clock.end(cfg.steps)
    out = np.asarray(jax.jit(lambda p,s,x: net(p, s, x, False)[0])(state[0], state[1], vx))
    clock.tell(score=dict(loss=float(cross_entropy(out, vy)), accuracy=float((out.argmax(-1) == vy).mean())))
