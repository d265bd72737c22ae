"""What a training step costs: fastai_xla, fastai on the CPU, loops written by hand, and JAX, side by side

    make bench                                                                # everything, in an hour or two
    python benchmarks/steps.py --models convnet --rounds 5                    # some models, all peers
    python benchmarks/steps.py --models convnet --bs 32 64 128
    python benchmarks/steps.py --host                                         # plain against replayed steps, on the host only
    python benchmarks/steps.py --growth                                       # memory over 2,000 steps

Each peer runs in a process of its own, which first trains two epochs to warm up. Then the peers take turns: in each round
each of them trains one epoch while the others sleep. So whatever else the machine does hits all of them alike, and the table
shows medians over the rounds, and medians of the ratios within a round. `--fresh` starts new processes for each round (a TPU
serves one process at a time and needs that).

What is measured is defined in `peers/clock.py`. Results go to benchmarks/results/steps.csv after each round, in place of
earlier rows of the same model, batch size and peer, and those of `--growth` to memory.csv. `python -m peers.same`, in this
folder, checks that the networks in JAX are those in PyTorch."""
import argparse, json, os, platform, subprocess, sys, tempfile, time
from importlib.metadata import version
from pathlib import Path
import pandas as pd
from peers.data import sizes

here = Path(__file__).resolve().parent
peers = ['fastai_cpu', 'fastai_compile', 'xm_step', 'torch_xla', 'accelerate',
         'jax', 'jax_nhwc', 'fastai_xla', 'fastai_xla_replay', 'fastai_xla_k8']
ours = peers[-3:]
key = ['model', 'bs', 'peer']
ratios = ['jax', 'torch_xla', 'xm_step']
everything = [(m, bs) for m,(bs,_) in sizes.items()] + [('convnet', 32), ('convnet', 128)]

class Peer:
    "A process that trains one peer, and waits for `turn` before each measured epoch"
    def __init__(self, peer, model, bs, steps, rounds, warm=2):
        self.name,self.score,self.ready,self.log = peer,None,False,tempfile.TemporaryFile('w+')
        cfg = json.dumps(dict(peer=peer, model=model, bs=bs, steps=steps, rounds=rounds, warm=warm))
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.proc = subprocess.Popen([sys.executable, '-m', 'peers', cfg], cwd=here, **pipes)
        self.hear()

    def hear(self):
        "The next message; remembers a score, explains an early end"
        msg = json.loads(self.proc.stdout.readline() or '{}')
        self.ready,self.score = 'ready' in msg, msg.get('score', self.score)
        if 'missing' in msg: print(f"{self.name} is left out: {msg['missing']}", flush=True)
        elif not msg:
            self.log.seek(0)
            print(f'{self.name} ended early:\n{self.log.read()[-2000:]}', flush=True)
        return msg

    def turn(self):
        self.proc.stdin.write('go\n')
        self.proc.stdin.flush()
        row = self.hear().get('row')
        if row: self.hear()   # ready again, or the score
        return row

    def close(self):
        self.proc.stdin.close()
        self.proc.wait()

def rounds_of(names, n, fresh, args):
    "Yield (round, rows so far) after each round"
    def start(names, rounds):
        started = [Peer(p, *args, rounds) for p in names]
        return [p for p in started if p.ready]
    rows,live = [],[] if fresh else start(names, n)
    def turn(p, i):
        row = p.turn()
        if row: rows.append(dict(peer=p.name, round=i) | row)
        return p if row else None
    for i in range(n):
        if fresh:
            for name in names:
                for p in start([name], 1):
                    if turn(p, i): rows[-1] |= p.score or {}
                    p.close()
        else: live = [p for p in live[1:]+live[:1] if turn(p, i)]   # another one first in each round
        yield i, rows
    for p in live:
        for r in rows:
            if r['peer'] == p.name: r |= p.score or {}
        p.close()
    yield n, rows

def save(rows, path):
    "Put `rows` into the file, in place of earlier ones of the same model, batch size and peer"
    new = pd.DataFrame(rows)
    if not len(new): return new
    old = pd.read_csv(path) if path.exists() else new[:0]
    same = pd.MultiIndex.from_frame(old[key]).isin(pd.MultiIndex.from_frame(new[key]))
    pd.concat([o for o in (old[~same], new) if len(o)]).to_csv(path, index=False, float_format='%.6g')
    return new

def summary(df):
    "Medians per peer, and medians of the wall time's ratios within each round"
    wall = df.pivot(index='round', columns='peer', values='wall_ms')
    cols = ['wall_ms', 'host_ms', 'cpu_ms', 'first_s', 'compile_s', 'compiles',
            'late_compiles', 'executions', 'to_host', 'sent_kb', 'peak_mb',
            'loss', 'accuracy']
    res = df.groupby('peer')[[c for c in cols if c in df]].median().reindex([p for p in peers if p in wall])
    for p in ratios:
        if p in wall: res[f'/{p}'] = wall.div(wall[p], axis=0).median()
    return res

def machine():
    "What the results depend on"
    cpu = next((l.split(':')[1].strip() for l in Path('/proc/cpuinfo').read_text().splitlines() if l.startswith('model name')),
               platform.processor())
    pkgs = ('torch', 'torch_xla', 'fastai', 'accelerate', 'jax')
    env = dict(device=('PJRT_DEVICE', 'default'), xla_flags=('XLA_FLAGS', ''), threads=('OMP_NUM_THREADS', 'all'))
    res = dict(date=time.strftime('%Y-%m-%d'), cpu=cpu, cores=os.cpu_count(), python=platform.python_version())
    return res | {k: os.environ.get(*v) for k,v in env.items()} | {p: version(p) for p in pkgs}

def compare(cases, names, n, fresh, steps, out):
    for model,bs in cases:
        size = steps or (8192//bs if model == 'convnet' else sizes[model][1])
        print(f'\n{model}, batches of {bs}, {size} steps an epoch', flush=True)
        for i,rows in rounds_of(names, n, fresh, (model, bs, size)):
            df = save([dict(model=model, bs=bs) | r for r in rows], out/'steps.csv')
        if len(df): print(summary(df).to_string(float_format='{:.3g}'.format, na_rep='-'), flush=True)
        if {'fastai_xla', 'fastai_xla_replay'} <= set(df.get('peer', [])):
            host = df.pivot(index='round', columns='peer', values='host_ms')
            print(f"host time of a plain step / of a replayed one: {(host.fastai_xla/host.fastai_xla_replay).median():.1f}", flush=True)

def growth(names, bs, steps, n, out):
    "Resident memory after each epoch, over `n` more epochs"
    rows = []
    for name in names:
        p = Peer(name, 'convnet', bs, steps, n+1, warm=3)
        mine = [p.turn() for _ in range(n+1)] if p.ready else []
        rows += [dict(model='convnet', bs=bs, peer=name, steps=i*steps, rss_mb=r['rss_mb']) for i,r in enumerate(mine)]
        p.close()
        save(rows, out/'memory.csv')
        if mine:
            a,b = mine[0]['rss_mb'],mine[-1]['rss_mb']
            print(f'{name:18} {a:.0f} MB, after {n*steps} more steps {b:.0f} MB: {b/a-1:+.2%}', flush=True)

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--models', nargs='+', choices=list(sizes),
                   help='default: all, with the convnet at three batch sizes, then the growth of memory')
    p.add_argument('--peers', nargs='+', choices=peers, default=peers)
    p.add_argument('--bs', nargs='+', type=int, help="batch sizes; default: each model's own")
    p.add_argument('--rounds', type=int, default=5)
    p.add_argument('--steps', type=int, help="steps of an epoch; default: each model's own")
    p.add_argument('--threads', type=int, help='threads of PyTorch on the CPU; default: one per core')
    p.add_argument('--fresh', action='store_true', help='new processes for each round')
    p.add_argument('--host', action='store_true', help='plain against replayed steps: convnet, resnet18, resnet50')
    p.add_argument('--growth', action='store_true', help='memory over 2,000 steps of the convnet')
    p.add_argument('--out', type=Path, default=here/'results')
    a = p.parse_args()
    os.environ.pop('OMP_NUM_THREADS', None)
    if a.threads: os.environ['OMP_NUM_THREADS'] = str(a.threads)
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out/'machine.json').write_text(json.dumps(machine(), indent=1)+'\n')
    names = ours[:2] if a.host else a.peers
    models = a.models or (['convnet', 'resnet18', 'resnet50'] if a.host else list(sizes))
    full = not (a.models or a.host or a.growth or a.bs)
    cases = everything if full else [(m, bs) for m in models for bs in (a.bs or [sizes[m][0]])]
    if not a.growth: compare(cases, names, a.rounds, a.fresh, a.steps, a.out)
    if a.growth or full: growth(names, 64, a.steps or 125, 16, a.out)

if __name__ == '__main__': main()
