"One peer in a process of its own, which `benchmarks/steps.py` starts with its settings as JSON, and talks to through its pipes"
import json, os, sys
from importlib import import_module
from types import SimpleNamespace

homes = dict(torch_xla='loops', accelerate='loops', jax='with_jax', jax_nhwc='with_jax')

out = os.fdopen(os.dup(1), 'w', buffering=1)
os.dup2(2, 1)   # what libraries print, progress bars too, goes to the log
cfg = SimpleNamespace(**json.loads(sys.argv[1]), out=out)
import_module(f'peers.{homes.get(cfg.peer, "with_fastai")}').run(cfg)
