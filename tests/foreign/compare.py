"Two runs of a notebook, cell by cell: a verdict, and what it rests on"
import ast, math
from .observe import numbers_and_words

tolerance = 1e-4
verdicts = ('same', 'random', 'differs', 'fails only on XLA', 'crash on XLA', 'timeout on XLA', 'passes only on XLA', 'fails on CPU too', 'left out', 'library')

def _apart(a, b, scale=0.):
    if a == b or math.isnan(a) and math.isnan(b): return False
    return not abs(a-b) <= tolerance*max(abs(a), abs(b), scale)

def _first(pairs, scale=0.): return next(((i,a,b) for i,(a,b) in enumerate(pairs) if _apart(a, b, scale)), None)

def _list(name, a, b):
    if len(a) != len(b): return [f'{name}: {len(a)} numbers on the CPU, {len(b)} on XLA']
    found = _first(zip(a, b))
    return [f'{name}[{found[0]}]: {found[1]:.7g} on the CPU, {found[2]:.7g} on XLA'] if found else []

def _tensor(name, a, b):
    if a['shape'] != b['shape']: return [f"{name}: shape {a['shape']} on the CPU, {b['shape']} on XLA"]
    finite = [abs(o) for o in a['some'] if math.isfinite(o)]
    found = _first(zip(a['some'], b['some']), max(finite, default=0.) + 1e-3)
    if found: return [f'{name}: {found[1]:.7g} on the CPU, {found[2]:.7g} on XLA']
    return [f"{name}: norm {a['norm']:.7g} on the CPU, {b['norm']:.7g} on XLA"] if _apart(a['norm'], b['norm'], 1e-3) else []

def _weights(name, a, b):
    if set(a) != set(b): return [f'{name}: weights {sorted(set(a) ^ set(b))[:3]} are in one run only']
    return [d for k in a for d in _tensor(f'{name}.{k}', a[k], b[k])]

def _learner(name, a, b):
    if 'unreadable' in a and 'unreadable' in b: return []
    for o,where in ((a, 'the CPU'), (b, 'XLA')):
        if 'unreadable' in o: return [f"{name} cannot be read on {where}: {o['unreadable']}"]
    found = [d for k in a['recorder'] for d in _list(f'{name}.recorder.{k}', a['recorder'][k], b['recorder'].get(k, []))]
    return found + _weights(name, a['weights'], b['weights'])

def _texts(a, b):
    (na,wa),(nb,wb) = numbers_and_words(a),numbers_and_words(b)
    if wa != wb:
        at = next((i for i,(p,q) in enumerate(zip(wa, wb)) if p != q), min(len(wa), len(wb)))
        return [f'printed {wa[max(0, at-30):at+50]!r} on the CPU, {wb[max(0, at-30):at+50]!r} on XLA']
    return _list('printed', na, nb)

def _warnings(a, b):
    kind = lambda ws: {(c, m[:60]): m for c,m in ws}
    a,b = kind(a),kind(b)
    return [f'only on XLA, {k[0]}: {m[:400]}' for k,m in b.items() if k not in a] + [f'only on the CPU, {k[0]}: {m[:200]}' for k,m in a.items() if k not in b]

def differences(a, b):
    "What differs in numbers and texts between two runs of a cell that both pass"
    changed = [f'{n} changed on {w} only' for o,p,w in ((a, b, 'the CPU'), (b, a, 'XLA')) for n in o['learners'] if n not in p['learners']]
    return _texts(a['text'], b['text']) + [d for n in a['learners'] if n in b['learners'] for d in _learner(n, a['learners'][n], b['learners'][n])] + changed

# Random numbers of the device

def names(source):
    "Names that a cell reads, and names that it assigns"
    lines = [l for l in source.splitlines() if not l.lstrip().startswith(('!', '%'))]
    try: tree = ast.parse('\n'.join(lines))
    except SyntaxError: return set(),set()
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return {n.id for n in nodes if isinstance(n.ctx, ast.Load)},{n.id for n in nodes if isinstance(n.ctx, ast.Store)}

class Random:
    "Which names hold what came of random numbers that were drawn on the device, and so cannot be compared"
    def __init__(self): self.names = set()
    def cell(self, source, res):
        read,made = names(source)
        hit = bool(res.get('draws') or read & self.names)
        self.names = self.names | made | set(res['learners']) if hit else self.names - made
        return hit

# Verdicts

def _failed(a): return f'{a["error"][0]}: {a["error"][1][:300]}'

def judge(a, b, random):
    "Verdict and detail of a cell, of its result on the CPU and on XLA"
    if a.get('ended'): return 'fails on CPU too',a['ended']
    if b.get('ended'): return f"{b['ended'].split(':')[0]} on XLA",b['ended']
    if a['error'] and b['error']:
        same = a['error'][0] == b['error'][0] and numbers_and_words(a['error'][1])[1] == numbers_and_words(b['error'][1])[1]
        return 'fails on CPU too',_failed(a) + ('' if same else f'; on XLA {_failed(b)}')
    if b['error']: return 'fails only on XLA',f"{_failed(b)} ({' > '.join(b['where'])})"
    if a['error']: return 'passes only on XLA',_failed(a)
    found = differences(a, b)
    told = _warnings(a['warnings'], b['warnings'])
    if found and random: return 'random','; '.join(told + found[:2])
    if found: return 'differs','; '.join(told + found[:4] + ([f'and {len(found)-4} more'] if len(found) > 4 else []))
    return ('differs' if any(t.startswith('only on XLA') for t in told) else 'same'),'; '.join(told)

def compare(cells, module, on_cpu, on_xla):
    "A row for each cell"
    taint,rows = Random(),[]
    for c in cells:
        a,b = on_cpu.get(c.number),on_xla.get(c.number)
        if c.left_out: verdict,detail = 'left out',c.left_out
        elif a is None and b is None: verdict,detail = 'library',module
        elif a is None or b is None: verdict,detail = 'left out','not reached on ' + ('the CPU' if a is None else 'XLA')
        else: verdict,detail = judge(a, b, not b.get('ended') and taint.cell(c.source, b))
        rows.append(dict(cell=c.number, first=c.first, verdict=verdict, detail=detail, cpu_s=(a or {}).get('seconds', ''), xla_s=(b or {}).get('seconds', ''), **costs(b)))
    return rows

def costs(res):
    "Costs of the last fit of the cell, per steady training batch, as the report tells them"
    cost = next((l['cost'] for l in (res or {}).get('learners', {}).values() if 'cost' in l), {})
    train = cost.get('steady', {}).get('training', {})
    return dict(executions=train.get('executions', ''), compiles=train.get('compiles', ''), to_host=train.get('to host', ''), reasons=' '.join(cost.get('reasons', [])))
