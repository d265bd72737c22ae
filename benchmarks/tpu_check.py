"""Compile the cases of the coverage table for a TPU, on a machine without one

    make tpu-check                          # all of them for v5e: an hour or two on two idle cores
    make tpu-check ARGS='--groups model'    # some of them
    make tpu-check ARGS='--topology v6e'

A row is written to benchmarks/tpu.csv as soon as it is there, and a case that has one is left out the next time (`--again` for all)."""
import csv, os, sys, warnings
from pathlib import Path

os.environ.setdefault('PJRT_DEVICE', 'CPU')
# for the CPU: little runs there
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true')
from fastcore.all import *
from fastai.vision.all import ProgressCallback, set_seed
from fastai_xla.all import *
from fastai_xla.aot.compile import check_compiler
from fastai_xla.coverage import groups as cases
from tpu_cases import groups as more

file = Path(__file__).parent/'tpu.csv'
fields = 'topology group case size compiles memory flops bound_ms bound_by cycles valid_cycles float64 recorded remark'.split()

def row(case, topology):
    "What the compiler says of a case"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        set_seed(0)
        learn = case.make()
        learn.remove_cbs([cb for cb in learn.cbs if type(cb) is ProgressCallback])
        r = learn.to_xla().tpu_report(topology, verbose=False)
    traced = r.step.traced
    res = dict(size=traced.size, compiles=r.fits, memory=r.memory, recorded=not traced.why, remark=(r.error or traced.why)[:160])
    if not r.step.program: return res
    valid = r.programs[1].program if len(r.programs) > 1 else None
    wide = sum(sum(p.program.wide().values()) for p in r.programs if p.program)
    res |= dict(flops=r.flops, bound_ms=round(r.bound_ms, 6), bound_by=r.bound_by)
    return res | dict(cycles=r.step.program.cycles, valid_cycles=valid and valid.cycles, float64=wide)

def done(topology):
    if not file.exists(): return set()
    with file.open() as f: return {(r['group'], r['case']) for r in csv.DictReader(f) if r['topology'] == topology}

@call_parse
def main(
    groups:str='', # Groups of cases, with commas between; all but inference by default, which trains nothing
    topology:str='v5e', # TPU
    again:store_true=False, # Also cases that have a row?
):
    "Compile the coverage table's cases for a TPU"
    check_compiler()
    known = set() if again else done(topology)
    new = not file.exists()
    with file.open('a', newline='') as f:
        out = csv.DictWriter(f, fields)
        if new: out.writeheader()
        for g in groups.split(',') if groups else [g for g in cases | more if g != 'inference']:
            for case in (cases | more)[g]:
                if (g, case.name) in known: continue
                try: res = row(case, topology)
                except Exception as e: res = dict(compiles=False, remark=f'{type(e).__name__}: {str(e).splitlines()[0][:150]}')
                out.writerow(dict(topology=topology, group=g, case=case.name) | res)
                f.flush()
                print(g, case.name, res, flush=True)
