"""The table in CONTRIBUTING.md of what of fastai is replaced, and where that stands.

    python docs/patches.py     # after a change of a patch

All modules of fastai are looked at before and after `import fastai_xla.all`."""
import sys
from importlib import import_module
from inspect import isclass
from pathlib import Path

begin,end = '<!-- made by docs/patches.py -->\n','<!-- end of the table -->\n'
users = 'basics vision.all vision.gan text.all tabular.all collab callback.all'.split()

def contents():
    "(module, class or '', name) -> object, of what fastai's modules and classes define"
    res = {}
    for name,m in list(sys.modules.items()):
        if not name.startswith('fastai.') or m is None: continue
        for k,v in list(vars(m).items()):
            res[name, '', k] = v
            if isclass(v) and v.__module__ == name: res.update({(name, k, n): o for n,o in list(vars(v).items())})
    return res

def home(
    o, # Any object
): # Module of fastai_xla whose code it is; empty if it is of another package
    o = getattr(o, 'fget', None) or getattr(o, '__func__', None) or o
    file = getattr(getattr(o, '__code__', None), 'co_filename', '')
    return file.rpartition('/fastai_xla/')[2].removesuffix('.py').replace('/', '.') if '/fastai_xla/' in file else ''

def table() -> str: # Markdown
    for m in users: import_module(f'fastai.{m}')
    before,rows = contents(),{}
    # a function that several modules have imported stands where it is defined
    defined = {at: getattr(v, '__module__', at[0]) == at[0] for at,v in before.items()}
    import fastai_xla.all
    for at,v in contents().items():
        if before.get(at) is v or at[2].startswith(('_orig_', '_under_')) or not home(v): continue
        if at[1] or defined.get(at): rows.setdefault((home(v), '.'.join(filter(None, at[:2]))), []).append(at[2])
    lines = [f"| `{at}` | `{of}` | {', '.join(f'`{k}`' for k in sorted(ks))} |" for (at,of),ks in sorted(rows.items())]
    return '\n'.join(['| module of fastai_xla | class or module of fastai | replaced or added |', '|---|---|---|', *lines, ''])

if __name__ == '__main__':
    path = Path(__file__).parent.parent/'CONTRIBUTING.md'
    head,_,rest = path.read_text().partition(begin)
    path.write_text(head + begin + table() + end + rest.partition(end)[2])
