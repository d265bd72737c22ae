"pip adds fastai_xla to Colab's TPU image and changes nothing there; on Kaggle the TPU's client finds an environment in which it starts"
import json, os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from pathlib import Path
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from fastai_xla import runtime

parser = ConfigParser(delimiters=['='])
parser.read(Path(__file__).resolve().parent.parent/'settings.ini', encoding='utf-8')
ini = parser['DEFAULT']
pythons = ('3.10', '3.11', '3.12', '3.13')
# Colab's TPU image of August 2026, which has Python 3.13 or 3.12, as its published list has it
colab = dict(torch='2.9.0', torchvision='0.24.0', torch_xla='2.9.0', fastai='2.8.8', fastcore='2.2.12', packaging='26.3', numpy='2.1.3')
colab_tpu = {'tpu-info': '0.8.1', 'absl-py': '1.4.0', 'grpcio': '1.83.0', 'protobuf': '7.35.1', 'requests': '2.32.4', 'PyYAML': '6.0.3'}

def installed(python):
    "What a Colab image with this Python holds"
    return colab | colab_tpu | {'libtpu': '0.0.21.1' if python == '3.13' else '0.0.21'}

def needed(python):
    "The requirements of `fastai_xla[tpu]` under this Python, their markers evaluated: pip would take those of the Python that runs it"
    lines = (ini['requirements'] + ini['tpu_requirements']).strip().splitlines()
    reqs = [Requirement(o) for o in lines]
    return [o for o in reqs if o.marker is None or o.marker.evaluate({'python_version': python})]

def pip_would_install(tmp, python, reqs, *opts):
    "Name -> version of what pip would install for this Python. Only metadata is downloaded"
    constraints = tmp/'constraints.txt'
    constraints.write_text('\n'.join(f'{k}=={v}' for k,v in installed(python).items()))
    dry = ['--dry-run', '--ignore-installed', '--quiet', '--report', '-', '--target', tmp/'site', '--retries', '1']
    dry += ['--ignore-requires-python']   # pip may ask that of the Python that runs it; asked below
    wheels = ['--only-binary', ':all:', '--python-version', python, '--constraint', constraints]
    wheels += ['--use-feature', 'fast-deps']   # an index that serves no metadata apart is asked for a part of the wheel
    cmd = [sys.executable, '-m', 'pip', 'install', *dry, *wheels, *opts, *(f'{o.name}{o.specifier}' for o in reqs)]
    res = subprocess.run(cmd, capture_output=True, text=True)
    assert res.returncode == 0, res.stderr
    found = [o['metadata'] for o in json.loads(res.stdout)['install']]
    for o in found: assert SpecifierSet(o.get('requires_python', '')).contains(f'{python}.0'), f"{o['name']} is not for Python {python}"
    return {o['name'].lower().replace('_', '-'): o['version'] for o in found}

def all_at_once(tmp, *asked):
    "What pip would install for each (python, requirements, options) of `asked`; a skip where no index answers"
    folders = [tmp/str(i) for i in range(len(asked))]
    for o in folders: o.mkdir()
    with ThreadPoolExecutor() as threads: found = [threads.submit(pip_would_install, o, *args) for o,args in zip(folders, asked)]
    if errors := [o.exception() for o in found if o.exception()]:
        try: pip_would_install(tmp, '3.12', [Requirement('packaging')], '--no-deps')
        except AssertionError as e: pytest.skip(f'pip reaches no package index: {e}')
        raise errors[0]
    return [o.result() for o in found]

@pytest.mark.parametrize('python', pythons)
def test_requirements_admit_what_colab_has(python):
    has = installed(python)
    for o in needed(python):
        assert o.specifier.contains(has[o.name]), f'{o} would replace {has[o.name]}'
        assert not o.extras, f'{o} brings requirements that are not named here'
    assert all(o.specifier.contains(f'{has[o.name]}+cpu') for o in needed(python) if o.name in ('torch', 'torchvision'))

def test_pip_keeps_what_colab_has(tmp_path):
    "There is a wheel of each for each Python, and it is the version that is there already"
    for python,new in zip(pythons, all_at_once(tmp_path, *((python, needed(python), '--no-deps') for python in pythons))):
        has = {k.replace('_', '-'): v for k,v in installed(python).items()}
        assert new == {k: has[k] for k in new} and {'torch', 'torch-xla', 'libtpu', 'tpu-info', 'fastai'} <= set(new), python

def test_pip_finds_a_libtpu_for_the_newest_python(tmp_path):
    "With what the TPU's packages require in their turn: `torch_xla[tpu]` asks for a libtpu that has no wheel for Python 3.13"
    reqs = [o for o in needed('3.13') if o.name in ('torch_xla', 'libtpu', 'tpu-info')]
    new, = all_at_once(tmp_path, ('3.13', reqs))
    assert new['libtpu'] == '0.0.21.1' and new['torch-xla'] == '2.9.0' and new['grpcio'] == colab_tpu['grpcio']

seen_by_torch_xla = '''
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == 'torch_xla': print('IMPORTED WITH', [k for k in ('TPU_PROCESS_ADDRESSES', 'CLOUD_TPU_TASK_ID') if k in os.environ])
sys.meta_path.insert(0, Finder())
import fastai_xla.runtime
'''

def test_kaggles_process_addresses_are_gone_before_the_client_starts():
    env = dict(TPU_PROCESS_ADDRESSES='local', CLOUD_TPU_TASK_ID='0')
    res = subprocess.run([sys.executable, '-c', seen_by_torch_xla], capture_output=True, text=True, env=os.environ | env)
    assert res.returncode == 0 and 'IMPORTED WITH []' in res.stdout, res.stdout+res.stderr
    assert res.stderr.count('has removed TPU_PROCESS_ADDRESSES and CLOUD_TPU_TASK_ID from the environment') == 1

def left(monkeypatch, **env):
    "What remains of `env`"
    for k in ('KAGGLE_KERNEL_RUN_TYPE', 'TPU_PROCESS_ADDRESSES', 'CLOUD_TPU_TASK_ID'): monkeypatch.delenv(k, raising=False)
    for k,v in env.items(): monkeypatch.setenv(k, v)
    runtime._leave_process_group()
    return {k: os.environ[k] for k in env if k in os.environ}

def test_kaggles_task_id_alone_is_removed(monkeypatch):
    with pytest.warns(UserWarning, match='has removed CLOUD_TPU_TASK_ID from'):
        assert left(monkeypatch, KAGGLE_KERNEL_RUN_TYPE='Interactive', CLOUD_TPU_TASK_ID='0') == {'KAGGLE_KERNEL_RUN_TYPE': 'Interactive'}

launched = dict(TPU_PROCESS_ADDRESSES='localhost:8476,localhost:8477', CLOUD_TPU_TASK_ID='1')
real = {'a pod': launched, 'a pod without addresses': dict(CLOUD_TPU_TASK_ID='3'),
        'launched on Kaggle': launched | dict(KAGGLE_KERNEL_RUN_TYPE='Batch'), 'Kaggle without a TPU': dict(KAGGLE_KERNEL_RUN_TYPE='Batch')}

@pytest.mark.parametrize('env', real.values(), ids=real)
def test_addresses_of_real_processes_stay(monkeypatch, recwarn, env):
    assert left(monkeypatch, **env) == env
    assert not recwarn
