"settings.ini is the one source of metadata: the keys that pyproject.toml repeats for nbdev say the same, and the wheel carries them all"
import re, subprocess, sys, zipfile
from configparser import ConfigParser
from pathlib import Path
from nbdev.config import get_config
from packaging.requirements import Requirement

root = Path(__file__).resolve().parent.parent
parser = ConfigParser(delimiters=['='])
parser.read(root/'settings.ini', encoding='utf-8')
ini = parser['DEFAULT']

def test_pyproject_repeats_settings():
    cfg = get_config(root)
    assert (cfg.lib_name, cfg.description, cfg.git_url) == (ini['lib_name'], ini['description'], ini['git_url'])
    assert f'{cfg.doc_host}{cfg.doc_baseurl}'.rstrip('/') == f"{ini['doc_host']}{ini['doc_baseurl']}"
    assert (cfg.branch, cfg.lib_path.name) == (ini['branch'], ini['lib_path'])

def test_pyproject_holds_nothing_else():
    project = re.search(r'^\[project\]\n(.*?)^\[', (root/'pyproject.toml').read_text(), re.M|re.S)[1]
    assert set(re.findall(r'^(\w+) =', project, re.M)) == {'name', 'description', 'dynamic'}

def chosen(lines, **env):
    "The requirements among `lines` whose marker holds"
    reqs = [Requirement(o) for o in lines]
    return {f'{o.name}{o.specifier}' for o in reqs if o.marker is None or o.marker.evaluate(env)}

def in_wheel(meta, extra, python):
    return chosen(re.findall('^Requires-Dist: (.*)$', meta, re.M), extra=extra, python_version=python)

def in_settings(extra, python):
    lines = ini['requirements'] + (ini[f'{extra}_requirements'] if extra else '')
    return chosen(lines.strip().splitlines(), python_version=python)

def test_wheel_is_usable(tmp_path):
    "sdist -> wheel -> installed elsewhere -> imported and run from another folder"
    def run(*cmd, **kwargs):
        res = subprocess.run(cmd, capture_output=True, text=True, **kwargs)
        assert res.returncode == 0, res.stdout+res.stderr
        return res.stdout
    run(sys.executable, '-m', 'build', '--outdir', str(tmp_path), str(root))
    wheel = next(tmp_path.glob('*.whl'))
    meta = zipfile.ZipFile(wheel).read(next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith('METADATA'))).decode()
    for extra in ('', 'tpu'):
        for python in ('3.12', '3.13'): assert in_wheel(meta, extra, python) == in_settings(extra, python)
    assert 'License-Expression: Apache-2.0' in meta
    run(sys.executable, '-m', 'pip', 'install', '--no-deps', '--target', str(tmp_path/'site'), str(wheel))
    code = (f"import sys; sys.path.insert(0, {str(tmp_path/'site')!r}); import fastai_xla.all, fastai_xla.doctor; "
            "print(fastai_xla.__file__, fastai_xla.doctor.doctor())")
    out = run(sys.executable, '-c', code, cwd=tmp_path)
    assert str(tmp_path/'site') in out and 'A small learner trains on xla:0' in out
