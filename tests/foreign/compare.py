"Two runs of a notebook, cell by cell: a verdict, and what it rests on"
import ast, math
from .observe import numbers_and_words

tolerance = 1e-4   # Relative
as_rounding = 30   # Times what a change of the weights by 1e-7 makes on the CPU
bad = ('differs', 'fails only on XLA', 'crash on XLA', 'timeout on XLA')
verdicts = ('same', 'rounding', 'random', 'warns', *bad, 'passes only on XLA', 'fails on CPU too', 'left out', 'library')

# Differences: label -> (size, text). The size is relative, infinite for what is no number

def _size(a, b, tol, scale):
    if a == b or math.isnan(a) and math.isnan(b): return 0.
    size = abs(a-b)/max(abs(a), abs(b), scale) if math.isfinite(a) and math.isfinite(b) else math.inf
    return size if size > tol else 0.

def _numbers(label, a, b, tol, scale=0.):
    if len(a) != len(b): return {label: (math.inf, f'{label}: {len(a)} numbers on the CPU, {len(b)} on XLA')}
    sizes = [_size(p, q, tol, scale) for p,q in zip(a, b)]
    if not any(sizes): return {}
    i = next(i for i,s in enumerate(sizes) if s)
    return {label: (max(sizes), f'{label}[{i}]: {a[i]:.7g} on the CPU, {b[i]:.7g} on XLA')}

def _tensor(label, a, b, tol):
    if a['shape'] != b['shape']: return {label: (math.inf, f"{label}: shape {a['shape']} on the CPU, {b['shape']} on XLA")}
    largest = max((abs(o) for o in a['some'] if math.isfinite(o)), default=0.) + 1e-3
    return _numbers(label, a['some'], b['some'], tol, largest) or _numbers(f'{label} norm', [a['norm']], [b['norm']], tol, 1e-3)

def _weights(label, a, b, tol):
    if set(a) != set(b): return {label: (math.inf, f'{label}: {sorted(set(a) ^ set(b))[:3]} are in one run only')}
    return {k: v for n in a for k,v in _tensor(f'{label}.{n}', a[n], b[n], tol).items()}

def _learner(name, a, b, tol):
    if 'unreadable' in a and 'unreadable' in b: return {}
    for o,where in ((a, 'the CPU'), (b, 'XLA')):
        if 'unreadable' in o: return {name: (math.inf, f"{name} cannot be read on {where}: {o['unreadable']}")}
    found = {}
    for k in a['recorder']: found |= _numbers(f'{name}.recorder.{k}', a['recorder'][k], b['recorder'].get(k, []), tol)
    return found | _weights(f'{name}.model', a['weights'], b['weights'], tol)

def _texts(a, b, tol):
    (na,wa),(nb,wb) = numbers_and_words(a),numbers_and_words(b)
    if wa == wb: return _numbers('printed', na, nb, tol)
    at = next((i for i,(p,q) in enumerate(zip(wa, wb)) if p != q), min(len(wa), len(wb)))
    return {'printed': (math.inf, f'printed {wa[max(0, at-30):at+50]!r} on the CPU, {wb[max(0, at-30):at+50]!r} on XLA')}

def differences(a, b, tol=tolerance):
    "What differs in numbers and texts between two runs of a cell"
    found = _texts(a['text'], b['text'], tol)
    for o,p,where in ((a, b, 'the CPU'), (b, a, 'XLA')):
        for n in o['learners']:
            if n not in p['learners']: found[n] = (math.inf, f'{n} changed on {where} only')
    for n in a['learners']:
        if n in b['learners']: found |= _learner(n, a['learners'][n], b['learners'][n], tol)
    return found

def is_rounding(found, a, nudged):
    "Are differences no larger than those that a nudge of the weights makes on the CPU?"
    if nudged is None or nudged.get('ended') or nudged['error']: return False
    noise,part = {},lambda label: '.'.join(label.split('.')[:2])   # 'learn.model'
    for label,(size,_) in differences(a, nudged, tolerance/as_rounding).items(): noise[part(label)] = max(size, noise.get(part(label), 0.))
    return all(size <= as_rounding*noise.get(part(label), 0.) for label,(size,_) in found.items())

def warned(a, b):
    "Warnings of one run only"
    by_kind = lambda ws: {(c, m[:60]): m for c,m in ws}
    a,b = by_kind(a['warnings']),by_kind(b['warnings'])
    return ([f'only on XLA, {k[0]}: {m[:400]}' for k,m in b.items() if k not in a]
            + [f'only on the CPU, {k[0]}: {m[:200]}' for k,m in a.items() if k not in b])

# Random numbers of the device

def names(source):
    "Names that a cell reads, and names that it assigns"
    lines = [l for l in source.splitlines() if not l.lstrip().startswith(('!', '%'))]
    try: tree = ast.parse('\n'.join(lines))
    except SyntaxError: return set(),set()
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return {n.id for n in nodes if isinstance(n.ctx, ast.Load)},{n.id for n in nodes if isinstance(n.ctx, ast.Store)}

class Drawn:
    "Which names hold what came of random numbers that were drawn on the device, and so cannot be compared"
    def __init__(self): self.names = set()
    def cell(self, source, res):
        read,made = names(source)
        hit = bool(res.get('draws') or read & self.names)
        self.names = self.names | made | set(res['learners']) if hit else self.names - made
        return hit

# Verdicts

def _failed(a): return f'{a["error"][0]}: {a["error"][1][:300]}'

def _texts_of(found, n=4):
    texts = [t for _,t in found.values()]
    return texts[:n] + ([f'and {len(texts)-n} more'] if len(texts) > n else [])

def judge(a, b, nudged, random):
    "Verdict and detail of a cell, of its results on the CPU, on XLA, and on the CPU from weights that were nudged"
    if a.get('ended'): return 'fails on CPU too',a['ended']
    if b.get('ended'): return f"{b['ended'].split(':')[0]} on XLA",b['ended']
    if a['error'] and b['error']:
        same = a['error'][0] == b['error'][0] and numbers_and_words(a['error'][1])[1] == numbers_and_words(b['error'][1])[1]
        return 'fails on CPU too',_failed(a) + ('' if same else f'; on XLA {_failed(b)}')
    if b['error'] and nudged and nudged.get('error'): return 'rounding',f'{_failed(b)}; so it does on the CPU from nudged weights'
    if b['error']: return 'fails only on XLA',f"{_failed(b)} ({' > '.join(b['where'])})"
    if a['error']: return 'passes only on XLA',_failed(a)
    found,told = differences(a, b),warned(a, b)
    if not found: return ('warns' if any(t.startswith('only on XLA') for t in told) else 'same'),'; '.join(told)
    if random: return 'random','; '.join(_texts_of(found, 2))
    if is_rounding(found, a, nudged): return 'rounding','; '.join(told + _texts_of(found, 2))
    return 'differs','; '.join(told + _texts_of(found))

def costs(res):
    "Costs of the last fit of the cell, per steady training batch, as the report tells them"
    cost = next((l['cost'] for l in (res or {}).get('learners', {}).values() if 'cost' in l), {})
    train = cost.get('steady', {}).get('training', {})
    return dict(executions=train.get('executions', ''), compiles=train.get('compiles', ''),
                to_host=train.get('to host', ''), reasons=' '.join(cost.get('reasons', [])))

def compare(cells, module, on_cpu, on_xla, nudged=None):
    "A row for each cell"
    drawn,rows = Drawn(),[]
    for c in cells:
        a,b,n = on_cpu.get(c.number),on_xla.get(c.number),(nudged or {}).get(c.number)
        if c.left_out: verdict,detail = 'left out',c.left_out
        elif a is None and b is None: verdict,detail = 'library',module
        elif a is None or b is None: verdict,detail = 'left out','not reached on ' + ('the CPU' if a is None else 'XLA')
        else: verdict,detail = judge(a, b, n, not b.get('ended') and drawn.cell(c.source, b))
        seconds = dict(cpu_s=(a or {}).get('seconds', ''), xla_s=(b or {}).get('seconds', ''))
        rows.append(dict(cell=c.number, first=c.first, verdict=verdict, detail=detail, why=c.known, **seconds, **costs(b)))
    return rows
