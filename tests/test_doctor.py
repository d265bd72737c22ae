"`fastai_xla_doctor` in staged environments: the verdict, the command that cures the fault, and the exit code"
import json, os, re, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
import pytest
from fastai_xla import doctor as dr

root = Path(__file__).resolve().parent.parent
fakes = '''
import importlib.metadata as metadata, json, os
fake,real = json.loads(os.environ.pop('FAKE_VERSIONS', '{}')),metadata.version
def version(name):
    if name not in fake: return real(name)
    if fake[name] is None: raise metadata.PackageNotFoundError(name)
    return fake[name]
metadata.version = version
'''

@pytest.fixture(scope='module')
def answers():
    "Address of a server that answers"
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self): self.send_response(404), self.end_headers()
        def log_message(self, *args): pass
    server = HTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/'
    server.shutdown()

nobody = 'http://127.0.0.1:9/'   # refuses

def doctor(tmp_path, url, *args, before='', versions=None, flags=True, **env):
    "Exit code and text of the command"
    (tmp_path/'site').mkdir()
    (tmp_path/'site'/'sitecustomize.py').write_text(fakes)
    gone = {*dr._faults, *dr._changes, 'FASTAI_HOME', 'TORCH_HOME', 'XDG_CACHE_HOME', 'PTXLA_TPU_LIBRARY_PATH'}
    full = {k: v for k,v in os.environ.items() if k not in gone or flags and k == 'XLA_FLAGS'}
    full |= dict(FAKE_VERSIONS=json.dumps(versions or {}), PYTHONPATH=f"{tmp_path/'site'}:{root}", HOME=str(tmp_path)) | env
    script = tmp_path/'fastai_xla_doctor'   # as pip makes it
    script.write_text(f"{before}\nimport fastai_xla.doctor as d\nd._sources = ({url!r},)\nif __name__ == '__main__': d.doctor_cli()")
    res = subprocess.run([sys.executable, script, *args], capture_output=True, text=True, env=full, cwd=tmp_path)
    assert not res.stderr.strip() or res.returncode, res.stderr
    return res.returncode,res.stdout+res.stderr

pair = r"-> pip install 'torch==2.9.\*' 'torchvision==0.24.\*' 'torch_xla==2.9.\*'"
without_device = {
    'no torch_xla': (dict(versions=dict(torch_xla=None)), 'FAULT torch_xla is not installed .*are built together', pair),
    'wrong torch': (dict(versions=dict(torch='2.8.0')), 'FAULT torch 2.8.0 is installed, and fastai_xla needs ==2.9', pair),
    'old fastai': (dict(versions=dict(fastai='2.7.19')), 'FAULT fastai 2.7.19 is installed', r"-> pip install 'fastai<2.9,>=2.8.8'"),
    'missing libtpu': (dict(versions=dict(libtpu=None), PJRT_DEVICE='TPU'),
                       'FAULT libtpu is not installed', r"-> pip install 'fastai_xla\[tpu\]'"),
    'WORLD_SIZE': (dict(WORLD_SIZE='8', RANK='0'),
                   'FAULT WORLD_SIZE=8: fastai takes this process for one of several', '-> unset WORLD_SIZE'),
    'CUDA': (dict(PJRT_DEVICE='CUDA'), 'FAULT PJRT_DEVICE=CUDA: torch_xla has no client for it', '-> unset PJRT_DEVICE')}

@pytest.mark.parametrize('stage', without_device)
def test_fault_that_is_seen_without_a_device(stage, tmp_path, answers):
    "The one fault and its cure; nothing is started"
    kwargs,what,cure = without_device[stage]
    code,out = doctor(tmp_path, answers, flags=False, **kwargs)
    assert code == 1 and re.search(f'{what}.*\n +{cure}', out), out
    assert out.count('FAULT') == out.count('->') == 1 and 'It does not train here: 1 fault above' in out and 'A small learner' not in out

def test_no_network(tmp_path):
    code,out = doctor(tmp_path, nobody, '--quick', flags=False)
    assert code == 0 and re.search('mind  No network: .*\n +-> on Kaggle: Settings > Internet > On', out) and out.count('->') == 1
    assert 'No fault was found. Nothing was trained.' in out

def test_variables_that_change_something(tmp_path, answers):
    "Each is told with its effect, and those that change nothing are not"
    set_here = dict(XLA_USE_BF16='1', XLA_FLAGS='--xla_cpu_enable_fast_math=false --a', PT_XLA_DEBUG='1', TPU_VISIBLE_CHIPS='0,1')
    silent = dict(XLA_DOWNCAST_BF16='0', WORLD_SIZE='1', RANK='0', XLA_USE_SPMD='')
    code,out = doctor(tmp_path, answers, '--quick', flags=False, **set_here, **silent)
    told = re.findall(r'^mind  (\w+)=(.*?): .*\n +-> unset \1 ', out, re.M)
    assert code == 0 and sorted(told) == [('PT_XLA_DEBUG', '1'), ('TPU_VISIBLE_CHIPS', '0,1'), ('XLA_FLAGS', '--a'), ('XLA_USE_BF16', '1')]

def test_all_well(tmp_path, answers):
    "Of a TPU: nothing to mind, no command"
    tpu = dr._outcome(kind='TPU', n=1, used=1, trained={'xla:0': True})
    before = f"import fastai_xla.doctor as d; d.probe_apart = lambda limit: {tpu}"
    code,out = doctor(tmp_path, answers, before=before, flags=False, PJRT_DEVICE='TPU')
    assert code == 0 and 'ok    A small learner trains on xla:0 (TPU) as on the CPU' in out and out.rstrip().endswith('\nIt trains.')
    assert '->' not in out and 'mind' not in out and 'FAULT' not in out

# With a device

trains = r'ok    A small learner trains on {} \(CPU\) as on the CPU'

def test_cpu_only_and_the_form(tmp_path, answers, monkeypatch, capsys):
    "What a terminal shows is in the bug report. Here in this process"
    for k in (*dr._faults, *dr._changes): monkeypatch.delenv(k, raising=False)
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setattr(dr, '_sources', (answers,))
    dr.doctor_cli(report=True)   # ends the process where it finds a fault
    out = capsys.readouterr().out
    assert re.search(trains.format('xla:0'), out) and 'FAULT' not in out
    assert re.search('mind  No TPU on this machine.*\n +-> in Colab: Runtime > Change runtime', out)
    assert 'It trains. Mind what is above.' in out and out.count('### ') == 4 and str(tmp_path) not in out

def test_several_devices_in_a_home_that_cannot_be_written(tmp_path, answers):
    "In a process of its own"
    code,out = doctor(tmp_path, answers, CPU_NUM_DEVICES='2', HOME='/dev/null/home')
    assert code == 0 and re.search(trains.format('xla:0, xla:1'), out), out
    assert re.search(r"mind  1 of 2 devices is used unless `to_xla\(devices='all'\)`\n +-> learn.to_xla\(devices='all'\)", out)
    assert re.search('mind  ~/.fastai and ~/.cache/torch cannot be written.*\n +-> export FASTAI_HOME=/tmp/fastai TORCH_HOME=', out)

def test_no_device(tmp_path, answers):
    code,out = doctor(tmp_path, answers, PJRT_DEVICE='TPU', TPU_SKIP_MDS_QUERY='1')
    assert code == 1 and re.search(r'FAULT The XLA client did not start \(PJRT_DEVICE=TPU\)(.*\n)*.*this machine has no TPU', out), out
    assert 'It does not train here: 1 fault above' in out and 'PJRT_DEVICE=CPU' in out

begun = """
import torch
torch.ones(3, requires_grad=True).sum().backward()
from fastai_xla.mesh import start_mesh
start_mesh()
"""

def test_what_a_process_has_begun_is_seen_in_itself(tmp_path, answers):
    "The trap that it has sprung, and the devices that it has made one"
    code,out = doctor(tmp_path, answers, before=begun, CPU_NUM_DEVICES='2')
    assert code == 0 and re.search(trains.format('all 2 devices'), out), out
    assert re.search(r'mind  This process ran a .backward\(\) before.*\n +-> restart Python, with `from fastai_xla.all import \*`', out)
    assert 'is used unless' not in out and 'XLA_USE_SPMD' not in out, out

# What no stage can show

def test_wrong_weights_are_a_fault():
    found = dr._training_findings(dr._outcome(kind='TPU', n=2, used=1, trained={'xla:0': True, 'xla:1': False}))
    assert [f.level for f in found] == ['FAULT', 'mind'] and 'On xla:1 (TPU) a small learner gets other weights' in found[0].what

@pytest.mark.parametrize('chips,why,cure', [(1, 'Does another process hold the TPU?', 'lsof'), (0, 'Is this machine busy?', '--limit')])
def test_device_that_does_not_answer(monkeypatch, chips, why, cure):
    monkeypatch.setattr(dr, 'tpu_chips', lambda: chips)
    res = dr.probe_apart(limit=.01)
    assert res['error'] == f'No answer within 0.01 seconds. {why}' and cure in res['cure']

def test_process_that_dies(tmp_path, monkeypatch):
    dies = tmp_path/'python'
    dies.write_text('#!/bin/sh\necho the last words >&2\nkill -ABRT $$\n')
    dies.chmod(0o755)
    monkeypatch.setattr(dr.sys, 'executable', str(dies))
    res = dr.probe_apart()
    assert 'Python ended with SIGABRT' in res['error'] and 'the last words' in res['error'] and '--report' in res['cure']
