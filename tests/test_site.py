"What the pages say is true of the package: install lines, numbers, README; and in the built site, where there is one, users find it"
import csv, json, re, shutil, statistics, subprocess, sys
from configparser import ConfigParser
from pathlib import Path
import pytest
from packaging.requirements import Requirement

root = Path(__file__).resolve().parent.parent
if not (root/'nbs').exists(): pytest.skip('the pages are in the repository, not in the sdist', allow_module_level=True)
parser = ConfigParser(delimiters=['='])
parser.read(root/'settings.ini', encoding='utf-8')
ini = parser['DEFAULT']
taught = [*sorted((root/'nbs').glob('howto/*.ipynb')), *sorted((root/'nbs').glob('explanations/*.ipynb')),
    *sorted((root/'nbs').glob('tutorials/*.ipynb')), root/'nbs'/'start.ipynb', root/'nbs'/'index.ipynb']
# drawn from files of the repository, so that they do not run elsewhere
local = {'05_speed', '08_fastai_tests'}

def cells(nb, kind):
    return [''.join(c['source']) for c in json.loads(nb.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == kind]

@pytest.mark.parametrize('nb', [o for o in taught if o.stem not in local], ids=lambda o: o.stem)
def test_a_notebook_installs_the_package_first_and_only_where_it_is_missing(nb):
    lines = cells(nb, 'code')[0].splitlines()
    assert lines[:2] == ['#| hide', 'try: import fastai_xla'] and lines[2].startswith('except ImportError: get_ipython().run_line_magic(')

@pytest.mark.parametrize('nb', sorted((root/'nbs').rglob('[!._]*.ipynb')), ids=lambda o: o.stem)
def test_cells_are_of_a_kind_that_builders_of_sites_know(nb):
    assert {c['cell_type'] for c in json.loads(nb.read_text(encoding='utf-8'))['cells']} <= {'markdown', 'code', 'raw'}

def figures(nb):
    "Source of each cell with a picture that the site shows"
    for c in json.loads(nb.read_text(encoding='utf-8'))['cells']:
        text = ''.join(c['source'])
        if any({'image/png', 'image/svg+xml'} & {*o.get('data', {})} for o in c.get('outputs', [])) and '#| hide\n' not in text: yield text

def test_figures_say_what_one_sees():
    found = [(nb.stem, text) for nb in sorted((root/'nbs').rglob('[!._]*.ipynb')) for text in figures(nb)]
    said = [(nb, m and m[1]) for nb,text in found for m in [re.search(r'^#\| fig-alt: (.*)$', text, re.M)]]
    assert len(said) > 20 and not [nb for nb,alt in said if not alt or len(alt) < 15]

def requirement(line):
    req = Requirement(re.search(r"'([^']*git\+[^']*)'", line)[1])
    return req.name, req.extras, req.url

def test_install_lines_are_those_of_the_metadata():
    "Name, extra and address, wherever a page or a cell installs from the repository"
    lines = [l for nb in taught for kind in ('code', 'markdown') for s in cells(nb, kind) for l in s.splitlines() if "' @ git+" not in l
        and re.search(r"'[^']*git\+[^']*'", l) and 'install' in l]
    git = 'git+' + ini['git_url'].replace('%(user)s', ini['user']).replace('%(repo)s', ini['repo'])
    assert len(lines) > len(taught)
    for l in lines:
        name,extras,url = requirement(l)
        assert (name, url) == (ini['lib_name'], git) and all(f'{e}_requirements' in ini for e in extras), l

def readme(): return (root/'README.md').read_text(encoding='utf-8')

def test_readme_is_short_and_has_no_html_tables():
    assert len(readme().splitlines()) < 150 and '<table' not in readme() and '<td' not in readme()

said = {'fastai_xla': 'fastai_xla_replay', 'fastai_xla, `steps_per_execution=8`': 'fastai_xla_k8', 'JAX, written by hand': 'jax',
    'torch_xla, written by hand': 'torch_xla', 'Accelerate, written by hand': 'accelerate',
    'the callback of fastai_xla_extensions': 'xm_step', 'fastai on the CPU, without XLA': 'fastai_cpu'}

def median(model, bs, peer, col):
    with open(root/'benchmarks'/'results'/'steps.csv') as f:
        found = [r[col] for r in csv.DictReader(f) if (r['model'], r['bs'], r['peer']) == (model, bs, peer)]
    return statistics.median(float(v) for v in found) if found[0] else ''

def row(text, first): return [c.strip() for c in re.search(rf'^\| {re.escape(first)} \|(.*)\|$', text, re.M)[1].split('|')]

@pytest.mark.parametrize('name', said)
def test_numbers_of_the_readme_are_those_of_the_benchmarks(name):
    wall,host,compiles = (median('convnet', '64', said[name], c) for c in ('wall_ms', 'host_ms', 'compiles'))
    assert row(readme(), name) == [f'{wall:.1f}', f'{host:.2f}', f'{compiles:.0f}' if compiles != '' else '']

bounds = {'resnet50, 64x64 pixels': ('resnet50', '.2f'), 'transformer': ('transformer', '.3f'), 'convnet': ('convnet', '.3f')}

@pytest.mark.parametrize('name', bounds)
def test_bounds_of_the_readme_are_those_of_the_compiler(name):
    model,form = bounds[name]
    with open(root/'benchmarks'/'tpu.csv') as f:
        tpu = next(r for r in csv.DictReader(f) if (r['topology'], r['group'], r['case']) == ('v5e', 'benchmark', model))
    batch,bound,host,host8 = row(readme(), name)
    assert (batch, bound) == (tpu['size'], f"{float(tpu['bound_ms']):{form}}")
    assert host == f"{median(model, batch, 'fastai_xla_replay', 'host_ms'):.2f}"
    if host8: assert host8 == f"{median(model, batch, 'fastai_xla_k8', 'host_ms'):.2f}"

def test_versions_that_start_names_are_those_of_the_metadata():
    text = '\n'.join(cells(root/'nbs'/'start.ipynb', 'markdown'))
    assert f"Python {ini['min_python']} to 3.13 will do" in text and 'torch==2.9.*' in ini['requirements'] and "'torch==2.9.*'" in text
    assert all(v in ini['tpu_requirements'] for v in ('0.0.21;', '0.0.21.1;'))

# The built site

site = root/'_docs'
built = pytest.mark.skipif(not (site/'index.html').exists(), reason='make docs first')

@built
def test_pages_are_found_by_what_users_type():
    pytest.importorskip('sphinx')
    res = subprocess.run([sys.executable, root/'docs'/'search.py', site], capture_output=True, text=True)
    assert res.returncode == 0 and res.stdout.strip() == 'every query finds its page', res.stdout + res.stderr

@built
def test_every_page_has_a_description_and_stays_at_home():
    for f in site.rglob('*.html'):
        text = f.read_text(encoding='utf-8')
        if f.name in ('search.html', 'genindex.html', '404.html'): continue
        assert 'property="og:title"' in text and 'rel="shortcut icon"' in text, f
        assert not re.search(r'<(script|img|link)[^>]* (src|href)="https?://(?!fastai-xla\.github\.io)', text), f
        assert 'alt=""' not in text and not re.search(r'<img(?![^>]* alt=)', text), f
