"settings.ini is the one source of metadata: the keys that pyproject.toml repeats for nbdev say the same, and the wheel carries them all"
import re, subprocess, sys, zipfile
from configparser import ConfigParser
from pathlib import Path
from nbdev.config import get_config

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

def test_wheel_is_usable(tmp_path):
    "sdist -> wheel -> installed elsewhere -> imported and run from another folder"
    def run(*cmd, **kwargs):
        res = subprocess.run(cmd, capture_output=True, text=True, **kwargs)
        assert res.returncode == 0, res.stdout+res.stderr
        return res.stdout
    run(sys.executable, '-m', 'build', '--outdir', str(tmp_path), str(root))
    wheel = next(tmp_path.glob('*.whl'))
    meta = zipfile.ZipFile(wheel).read(next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith('METADATA'))).decode()
    for line in ini['requirements'].split(): assert f'Requires-Dist: {line.split("==")[0].split(">")[0]}' in meta
    assert 'Requires-Dist: torch_xla[tpu]==2.9.0; extra == "tpu"' in meta and 'License-Expression: Apache-2.0' in meta
    run(sys.executable, '-m', 'pip', 'install', '--no-deps', '--target', str(tmp_path/'site'), str(wheel))
    code = f"import sys; sys.path.insert(0, {str(tmp_path/'site')!r}); import fastai_xla.all, fastai_xla.cli; print(fastai_xla.__file__); fastai_xla.cli.doctor()"
    out = run(sys.executable, '-c', code, cwd=tmp_path)
    assert str(tmp_path/'site') in out and 'It trains.' in out
