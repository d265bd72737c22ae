"""Are the JAX networks the PyTorch ones? Two training steps of both from the same weights, in float64: losses, weights, running statistics

    cd benchmarks && python -m peers.same"""
import jax, numpy as np, torch
from . import models, with_jax

def conv_names(name):
    "(layer in JAX, convolution, batch norm), and the last layer in PyTorch"
    if name == 'convnet': return [(f'c{i}', f'{i}.0', f'{i}.1') for i in range(3)], '5'
    res = [('stem', 'conv1', 'bn1')]
    for cs,down in with_jax.blocks(name):
        i,j = cs[0][0][1:].split('.')[:2]
        at = f'layer{int(i)+1}.{j}'
        res += [(c[0], f'{at}.conv{k+1}', f'{at}.bn{k+1}') for k,c in enumerate(cs)]
        if down: res.append((down[0], f'{at}.downsample.0', f'{at}.downsample.1'))
    return res, 'fc'

def converted(name, model):
    "Parameters and statistics of a PyTorch model, for the JAX one"
    sd,p,s = {k: v.numpy().copy() for k,v in model.state_dict().items()},{},{}
    def linear(a, b): p[f'{a}.w'],p[f'{a}.b'] = sd[f'{b}.weight'].T,sd[f'{b}.bias']
    def norm(a, b): p[f'{a}.w'],p[f'{a}.b'] = sd[f'{b}.weight'],sd[f'{b}.bias']
    if name == 'transformer':
        p |= dict(emb=sd['emb.weight'], pos=sd['pos'])
        for i in range(4):
            for a,b in (('qkv','qkv'), ('out','out'), ('up','mlp.0'), ('down','mlp.2')): linear(f'{i}.{a}', f'body.{i}.{b}')
            for o in ('ln1','ln2'): norm(f'{i}.{o}', f'body.{i}.{o}')
        norm('ln', 'body.4')
        linear('fc', 'body.5')
        return p, s
    convs,fc = conv_names(name)
    for a,c,b in convs:
        p[f'{a}.k'] = sd[f'{c}.weight']
        norm(a, b)
        s[f'{a}.mean'],s[f'{a}.var'] = sd[f'{b}.running_mean'],sd[f'{b}.running_var']
    linear('fc', fc)
    return p, s

def check(name, layout):
    with_jax.layout = layout
    net,p0,s0,opt_init,update = with_jax.make(name)
    model = models.make_model(name).double()
    opt = models.make_opt(name, model.parameters())
    x = (torch.randint(200, (4,64)) if name == 'transformer'
         else torch.randn(4, *((1,28,28) if name == 'convnet' else (3,64,64)), dtype=torch.float64))
    y = torch.randint(200, (4,64)) if name == 'transformer' else torch.randint(10, (4,))
    p,s = converted(name, model)
    assert {k: v.shape for k,v in (p|s).items()} == {k: v.shape for k,v in (p0|s0).items()}
    step = jax.jit(with_jax.make_step(net, update))
    state,xj = (p, s, opt_init(p)),np.moveaxis(x.numpy(), 1, -1) if layout == 'NHWC' else x.numpy()
    for _ in range(2):
        loss = models.loss_of(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        state,loss_j = step(state, xj, y.numpy())
    p,s = converted(name, model)
    worst = [abs(float(loss_j)-loss.item())] + [max((np.abs(a[k]-b[k]).max() for k in a), default=0.)
                                                for a,b in ((p,state[0]), (s,state[1]))]
    print(f'{name:12} {layout}  differences: loss {worst[0]:.0e}, weights {worst[1]:.0e}, statistics {worst[2]:.0e}', flush=True)
    assert max(worst) < 1e-6

if __name__ == '__main__':
    jax.config.update('jax_enable_x64', True)
    for name in ('convnet', 'resnet18', 'resnet50', 'transformer'): check(name, 'NCHW')
    for name in ('convnet', 'resnet18'): check(name, 'NHWC')
