"settings.ini is the one source of metadata: the keys that pyproject.toml repeats for nbdev say the same, and the wheel carries them all"
import fcntl, os, re, subprocess, sys, tarfile, zipfile
from configparser import ConfigParser
from pathlib import Path
import pytest
from nbdev.config import get_config
from packaging.requirements import Requirement
from fastai_xla import __version__
from fastai_xla.doctor import report_form

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

def run(*cmd, **kwargs):
    res = subprocess.run(cmd, capture_output=True, text=True, **kwargs)
    assert res.returncode == 0, res.stdout+res.stderr
    return res.stdout

@pytest.fixture(scope='module')
def dist(tmp_path_factory):
    "sdist, and the wheel that is built from it; once where both processes come here"
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base)/'dist'
    path.mkdir(exist_ok=True)
    with open(path/'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(path.glob('*.whl')): run(sys.executable, '-m', 'build', '--outdir', str(path), str(root))
    return next(path.glob('*.tar.gz')),next(path.glob('*.whl'))

def test_wheel_is_usable(dist, tmp_path):
    "Installed elsewhere, imported and run from another folder"
    wheel = dist[1]
    names = zipfile.ZipFile(wheel).namelist()
    meta = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith('METADATA'))).decode()
    for extra in ('', 'tpu'):
        for python in ('3.12', '3.13'): assert in_wheel(meta, extra, python) == in_settings(extra, python)
    assert 'License-Expression: Apache-2.0' in meta and f'Version: {__version__}\n' in meta and 'fastai_xla/py.typed' in names
    for n in (10, 11, 12, 13): assert f'Classifier: Programming Language :: Python :: 3.{n}\n' in meta
    assert {*re.findall(r'^Project-URL: (\w+),', meta, re.M)} == {'Repository', 'Documentation', 'Changelog', 'Issues'}
    run(sys.executable, '-m', 'pip', 'install', '--no-deps', '--target', str(tmp_path/'site'), str(wheel))
    code = (f"import sys; sys.path.insert(0, {str(tmp_path/'site')!r}); import fastai_xla.all, fastai_xla.doctor; "
            "print(fastai_xla.__file__, fastai_xla.doctor.doctor())")
    out = run(sys.executable, '-c', code, cwd=tmp_path)
    assert str(tmp_path/'site') in out and 'A small learner trains on xla:0' in out

def test_distributions_are_small_and_complete(dist):
    pytest.importorskip('twine')
    run(sys.executable, '-m', 'twine', 'check', '--strict', *map(str, dist))
    assert all(o.stat().st_size < 780_000 for o in dist)

def test_tests_of_the_sdist_run(dist, tmp_path):
    "Away from the repository: the notebooks are left out, everything else finds what it needs"
    with tarfile.open(dist[0]) as f: f.extractall(tmp_path)
    src = next(tmp_path.iterdir())
    tests = {o.relative_to(root) for o in (root/'tests').rglob('*.py')}
    assert tests == {o.relative_to(src) for o in (src/'tests').rglob('*.py')}
    env = os.environ | dict(PYTHONPATH=str(src))
    pytest_ = (sys.executable, '-m', 'pytest', '-p', 'no:xdist', '-o', 'addopts=', '-q')
    out = run(*pytest_, 'tests/test_notebooks.py', 'tests/test_metadata.py', 'tests/test_doctor.py', '-k', 'notebook or settings or dies',
              cwd=src, env=env)
    assert '2 passed, 1 skipped' in out, out

def test_types_of_public_names():
    "`make types`: right uses pass and wrong ones do not"
    pytest.importorskip('mypy')
    line = re.search('^types:.*\n.*-m (.*)$', (root/'Makefile').read_text(), re.M)[1]
    run(sys.executable, '-m', *line.split(), cwd=root)

# What stands beside the package

def test_version_is_one():
    assert re.search(f'^version: {re.escape(__version__)}$', (root/'CITATION.cff').read_text(), re.M)
    log = (root/'CHANGELOG.md').read_text()
    versions = re.findall(r'^## \[(.*?)\](.*)$', log, re.M)
    assert [o[0] for o in versions][:2] == ['Unreleased', __version__]
    for v,date in versions:
        assert f'\n[{v}]: {ini["git_url"]}/' in log
        assert re.match('$' if v == 'Unreleased' else r' - \d{4}-\d\d-\d\d$', date)
    assert {*re.findall('^### (.*)$', log, re.M)} <= {'Added', 'Changed', 'Deprecated', 'Removed', 'Fixed', 'Security'}

def test_issue_templates_ask_for_the_doctor():
    "The form that it prints has the same headings"
    headings = re.findall('^### .*$', report_form(''), re.M)
    bug,missing = ((root/'.github'/'ISSUE_TEMPLATE'/f'{o}.md').read_text() for o in ('bug_report', 'missing'))
    assert re.findall('^### .*$', bug, re.M) == headings and '`fastai_xla_doctor --report`' in bug
    assert headings[-1] == '### fastai_xla_doctor' and headings[-1] in missing

def test_every_step_of_a_workflow_is_a_make_target():
    targets = {*re.findall(r'^([\w-]+):', (root/'Makefile').read_text(), re.M)}
    files = [*(root/'.github'/'workflows').glob('*.yml')]
    assert {o.stem for o in files} == {'test', 'docs', 'release'}
    for o in files:
        steps = re.findall('- run: (.*)$', o.read_text(), re.M)
        assert steps and all(re.fullmatch(r'make ([\w-]+)', s)[1] in targets for s in steps)
    pythons = re.findall(r"'(3\.\d+)'", re.search(r'python: \[(.*)\]', (root/'.github'/'workflows'/'test.yml').read_text())[1])
    assert pythons == [f'3.{n}' for n in range(10, 14)]

# What make does; nothing is installed

def make(where, *args, **env):
    "Exit code and what `make` says"
    res = subprocess.run(['make', *args], cwd=where, env=dict(PATH=os.environ['PATH']) | env, capture_output=True, text=True)
    return res.returncode,res.stdout+res.stderr

@pytest.fixture
def clone(tmp_path):
    for o in ('Makefile', 'settings.ini', 'setup.py', 'pyproject.toml'): (tmp_path/o).write_bytes((root/o).read_bytes())
    return tmp_path

def python(folder, name, version):
    "A Python that knows no more than its version"
    folder.mkdir(exist_ok=True)
    (folder/name).write_text(f"""#!/bin/sh
exec {sys.executable} -c 'import sys; sys.version_info = {version}; exec(sys.argv[1])' "$2"
""")
    (folder/name).chmod(0o755)

def test_make_takes_a_python_that_fits(clone):
    "The first, and none that is too old or too new"
    path = f"{clone/'bin'}:/usr/bin:/bin"
    for version in ((3, 9), (3, 14)):
        for name in ('python3', *(f'python3.{n}' for n in range(10, 14))): python(clone/'bin', name, version)
        code,out = make(clone, '.venv/installed', PATH=path)
        assert code == 2 and 'fastai_xla takes Python 3.10 to 3.13: make ... PYTHON=' in out and not (clone/'.venv').exists(), out
        python(clone/'bin', 'python3.12', (3, 12))
        assert '"python3.12" -m venv .venv' in make(clone, '-n', 'demo', PATH=path)[1]
        assert make(clone, '.venv/installed', 'PYTHON=python3', PATH=path)[0] == 2
    python(clone/'bin', 'python3', (3, 11))
    assert '"python3" -m venv .venv' in make(clone, '-n', 'demo', PATH=path)[1]
    lowest,end = (ini[k].replace('.', ', ') for k in ('min_python', 'max_python'))
    assert f'not ({lowest}) <= sys.version_info < ({end})' in (clone/'Makefile').read_text()

def test_make_installs_again_what_has_changed(clone):
    "So that the console scripts are those of the metadata"
    (clone/'.venv').mkdir()
    for o in ('installed', 'installed-dev'): (clone/'.venv'/o).touch()
    assert 'pip install' not in make(clone, '-n', 'demo', 'test')[1]
    for o in ('settings.ini', 'setup.py', 'pyproject.toml'):
        os.utime(clone/o, (2e9, 2e9))
        said = make(clone, '-n', 'demo', 'test')[1]
        assert "install --quiet --no-compile -e '." in said and "install --quiet --no-compile -e '.[dev]'" in said
        os.utime(clone/o, (1e9, 1e9))
