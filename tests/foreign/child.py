"One run of one notebook in this process; a line of JSON for each cell goes to the job's file"
import contextlib, importlib, json, random, re, time, traceback, warnings
from pathlib import Path
import fastai.vision.all, fastai.text.all, fastai.tabular.all, fastai.collab, fastai.vision.gan, fastai.callback.all
from fastai.callback.core import TrainEvalCallback
from fastai.callback.progress import ProgressCallback
from fastai.learner import CastToTensor, Recorder, defaults
import matplotlib.pyplot as plt, numpy as np, torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config
from . import observe, prepare, standins

seed = 20

def reseed(mode):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if mode == 'xla':
        from fastai_xla.seeds import manual_seed
        manual_seed(seed)

def start(job):
    "The shell in which cells run, with everything replaced that has to be"
    making = None
    prepare.no_downloads(job['data'], standins.makers(job['recipes']))
    prepare.no_pretrained()
    if not job['dropout']: prepare.no_dropout()
    if job['mode'] == 'xla':
        import fastai_xla.all
        making = prepare.learners(lambda learn: learn.to_xla())
    if job['mode'] == 'nudged': prepare.learners(lambda learn: prepare.nudge(learn, job['nudge']))
    shell = InteractiveShell.instance(config=Config(HistoryManager=dict(enabled=False)))
    shell.showtraceback = shell.showsyntaxerror = lambda *args, **kwargs: None
    return shell,making

def module_names(module):
    return {k: v for k,v in vars(importlib.import_module(module)).items() if not k.startswith('__')}

class DefaultCallbacks:
    "`defaults.callbacks` as it would be had nothing been imported but what the cells so far import"
    learner = re.compile(r'from fastai\.(?!data|torch_|optimizer|imports|losses|layers|callback\.core|text\.core)')
    progress = re.compile(r'from fast(ai\.((vision|text|tabular|callback|medical)\.all|callback\.progress|collab)|book) import')
    def __init__(self): defaults.callbacks = [TrainEvalCallback]
    def before(self, cell):
        source = cell['source']
        if self.learner.search(source): self.add(Recorder, CastToTensor)
        if self.progress.search(source): self.add(Recorder, ProgressCallback, CastToTensor)
        if cell['export'] and 'defaults.callbacks.append' in source:
            self.add(*(c for c in (Recorder, ProgressCallback, CastToTensor) if c.__name__ in source))
    def add(self, *cbs): defaults.callbacks += [c for c in cbs if c not in defaults.callbacks]

def shown(captured):
    texts = [captured.stdout]
    for o in captured.outputs:
        data = getattr(o, 'data', None) or {}
        texts.append(str(data.get('text/plain') or data.get('text/html') or ''))
    return '\n'.join(t for t in texts if t)

def run_cell(shell, source):
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        with capture_output() as captured: res = shell.run_cell(source, store_history=False)
    error = res.error_in_exec or res.error_before_exec
    where = traceback.extract_tb(error.__traceback__)[-6:] if error else []
    return dict(seconds=round(time.monotonic()-began, 2), text=shown(captured),
        error=error and [type(error).__name__, str(error)], where=[f'{Path(o.filename).name}:{o.lineno} {o.name}' for o in where],
        warnings=sorted({(w.category.__name__, str(w.message)) for w in told}))

def observed(shell, mode, before):
    "State of the learners that the cell has changed, and what their fits have cost"
    res = {}
    for name,learn in observe.learners(shell.user_ns).items():
        now = observe.state(learn)
        if before.get(name) == (id(learn), now): continue
        before[name] = (id(learn), now)
        res[name] = now
        if mode == 'xla' and hasattr(learn, 'xla_opt'):
            with contextlib.suppress(Exception): res[name] = now | dict(cost=observe.cost(learn))
    return res

def main(job):
    out = open(job['out'], 'a', buffering=1)
    tell = lambda **kwargs: out.write(json.dumps(kwargs)+'\n')
    shell,making = start(job)
    before,loaded,callbacks = {},False,DefaultCallbacks()
    if job['setup']: shell.run_cell(job['setup'], store_history=False).raise_error()
    tell(ready=True)
    for cell in job['cells']:
        callbacks.before(cell)
        if cell['export'] and job['module']:
            if not loaded: shell.user_ns.update(module_names(job['module']))
            loaded = True
            continue
        tell(start=cell['number'])
        reseed(job['mode'])
        drawn = observe.draws() if job['mode'] == 'xla' else 0
        res = run_cell(shell, cell['source'])
        plt.close('all')
        res['learners'] = observed(shell, job['mode'], before)
        if job['mode'] == 'xla':
            res['draws'] = observe.draws()-drawn
            res['unmoved'],making.unmoved = making.unmoved,[]
        tell(cell=cell['number'], **res)
    tell(end=True)
    out.close()
