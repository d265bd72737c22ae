"""What PyTorch's developers try their operators with, on the CPU and on XLA: shapes, types, values and gradients

`op_db` holds some 600 operators and makes samples of arguments for each; a few of each are taken. To import it is to forbid torch's flags
to be set for the rest of the process, so it is done in one of its own."""
from collections import Counter
from itertools import islice
import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils._pytree import tree_leaves, tree_map
from fastai_xla.all import *
from fastai_xla.lowerings.all import without_lowerings
from fastai_xla.transfer import fetch

draws = '''bernoulli multinomial normal rand_like randn_like randint_like randint randn rand uniform exponential geometric log_normal
    cauchy svd_lowrank pca_lowrank nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.rrelu
    nn.functional.alpha_dropout nn.functional.feature_alpha_dropout nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d nn.functional.scaled_dot_product_attention nn.functional.multi_head_attention_forward'''.split()
empty = 'empty empty_like empty_permuted empty_strided new_empty new_empty_strided'.split()
# sparse tensors and half complex numbers; indices and factors that nobody's device decides; cuts that leave no pixel, and repeats of none
not_here = 'to_sparse chalf to tensor_split geqrf ormqr repeat tile nn.functional.pad.replicate_negative'.split()
# gradients of vectors that are known up to a sign or a phase; of distances that count differences, which are None here and 0 there
no_slopes = '''svd linalg.svd linalg.eigh linalg.eig symeig linalg.qr qr linalg.householder_product
    linalg.lu linalg.lu_factor lu lu_unpack nn.functional.pdist'''.split()
# errors of nothing at all, or of dimension 0 of single numbers
not_of_nothing = '''cumprod masked_select nn.functional.layer_norm native_layer_norm gather index_fill index_copy index_select
    index_add index_reduce squeeze_copy logdet linalg.det linalg.slogdet scatter_reduce'''.split()

# where samples are made, it goes through all modules for the source of each frame: half of the time
core.extract_test_fn = common_utils.extract_test_fn = lambda: None

def name_of(op): return f'{op.name}.{op.variant_test_name}'.rstrip('.')

ops = [op for op in op_db if torch.float32 in op.supported_dtypes('cpu') and not op.name.startswith(('sparse.', 'signal.'))
       and not {op.name, name_of(op)} & {*draws, *empty, *not_here}]

def on(device, o):
    def moved(t): return t.detach().to(device).clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
    return tree_map(moved, o)
def tensors(o): return [t for t in tree_leaves(o) if isinstance(t, torch.Tensor)]

def slopes(sample, args, res, finish):
    "Gradients of what is returned, times 1, 2, 3, ..."
    ys = [y for y in tensors(finish(res)) if y.requires_grad]
    xs = [x for x in tensors(args) if x.requires_grad]
    if not ys or not xs: return []
    total = sum((y*torch.arange(1., y.numel()+1, device=y.device).view(y.shape)).real.sum() for y in ys)
    return [g for g in torch.autograd.grad(total, xs, allow_unused=True) if g is not None]

def outcome(op, sample, device):
    args = on(device, (sample.input, sample.args, {k: device if k == 'device' else v for k,v in sample.kwargs.items()}))
    res = op.op(args[0], *args[1], **args[2])
    grads = slopes(sample, args, res, sample.output_process_fn_grad) if op.supports_autograd and op.name not in no_slopes else []
    return [o for o in tensors(sample.output_process_fn_grad(res))],grads

def close(a, b):
    most = b.abs().nan_to_num(posinf=0).max().item() if b.numel() and (b.is_floating_point() or b.is_complex()) else 0
    torch.testing.assert_close(a, b, rtol=1e-3, atol=5e-4*max(1, most), equal_nan=True)

counts = Counter()   # samples that are tried, and those that the CPU refuses

def on_cpu(op, sample):
    "What comes of it there; None if the CPU refuses it"
    counts['tried'] += 1
    try: return outcome(op, sample, 'cpu')
    except Exception: counts['refused'] += 1

def pairs(op, sample, want):
    "Tensors on XLA, each with the CPU's"
    (got,slopes),(want,want_slopes) = outcome(op, sample, device()),want
    assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want], 'shape or type'
    return [(a.detach(), b.detach()) for a,b in zip([*got, *slopes], [*want, *want_slopes], strict=True) if b.layout == torch.strided]

def differs(op, samples):
    "What of the samples is otherwise on XLA, in one graph; None if nothing is"
    wants = [(s, want) for s in samples if (want := on_cpu(op, s))]
    try:
        both = [p for s,want in wants for p in pairs(op, s, want)]
        for a,(_,b) in zip(fetch([a for a,_ in both]), both): close(a, b)
    except Exception as e: return f'{type(e).__name__}: {e}'

def of_nothing(sample):
    ts = tensors((sample.input, sample.args))
    return bool(ts) and (not ts[0].dim() or any(not t.numel() for t in ts))

def wrong(part, of):
    "Operator -> what is otherwise on XLA, in one part of all operators"
    res = {}
    for op in ops[part::of]:
        torch.manual_seed(0)
        samples = op.sample_inputs('cpu', torch.float32, requires_grad=op.supports_autograd)   # made one by one, some hundreds
        if op.name in not_of_nothing: samples = (s for s in samples if not of_nothing(s))
        if why := differs(op, list(islice(samples, 3))): res[name_of(op)] = why[:300]
    assert counts['refused'] < .05*counts['tried'], counts   # else little has been compared
    return res

def planted():
    "The same of an operator with a fault of torch_xla's and without it"
    op = next(op for op in ops if name_of(op) == 'norm.inf')
    samples = list(op.sample_inputs('cpu', torch.float32))[:1]
    with without_lowerings('norm'): found = differs(op, samples)
    return bool(found),differs(op, samples)
