"""Build the site, or README.md, from the notebooks, without Quarto.

    python docs/build.py           # nbs/ -> _proc/ -> _build/src/ -> _build/html/ -> _docs/
    python docs/build.py readme    # nbs/index.ipynb -> README.md

nbdev does its usual work first, from `nbs/` to `_proc/`: hidden cells are dropped, exported code is replaced by `show_doc`, symbols in
backticks are linked. `markup.py` rewrites the Quarto markup that is left, and each page is staged in `_build/src/` under the address
that Quarto would give it. Sphinx renders the pages (`conf.py`), any warning being an error. `check.py` makes links to the site's own
address relative and looks up every link. Only a site without a fault replaces the one in `_docs/`. Beside each `page.html` there is the
page as markdown, `page.html.md`, which is where the modules' docstrings point.

The navigation is in `nbs/sidebar.yml`: a section for each folder, in the order of the file names. A new notebook needs no entry."""
import ast, base64, json, os, re, shutil, subprocess, sys, yaml
from pathlib import Path
from fastcore.nbio import nb_frontmatter, read_nb
from fastcore.xtras import fenced
from nbdev.config import get_config, nbpath2html
from nbdev.doclinks import NbdevLookup, nbglob
from nbdev import processors
from nbdev.serve import proc_nbs
from check import check, relink
from markup import directive, divs, gfm_div, gfm_entry, links, myst_div, myst_entry

root = Path(__file__).resolve().parent.parent
os.chdir(root)
cfg = get_config()
nbs,proc,build,site = cfg.nbs_path,root/'_proc',root/'_build',cfg.doc_url.rstrip('/')

# nbdev's part

def lost(
    path:Path, # A notebook
) -> str: # What nbdev would lose: it makes front matter of the cell with the title, and drops anything else in it
    title = next((c.source for c in read_nb(path).cells if c.cell_type == 'markdown'), '')
    rest = re.sub(r'# .*\s*(> .*)?(\s*- .*:.*)*', '', title, count=1).strip() if title.startswith('# ') else ''
    return f"{path.relative_to(root)}: nbdev drops what follows the title in its cell. Give it a cell of its own:\n{rest}\n" if rest else ''

def needed(
    cell, # A cell that nbdev would execute for the entries of `show_doc`: it has an import
    would=processors._do_eval, # nbdev's own choice
) -> bool: # Whether to do so: an example that imports something stands on other cells, which nbdev has not executed
    mixed = cell.cell_type == 'code' and not processors._is_showdoc(cell) and not cell.directives_.keys() & {'export', 'exports', 'exporti'}
    return not (mixed and any(not isinstance(o, (ast.Import, ast.ImportFrom)) for o in cell.parsed_() or [])) and would(cell)

def process(
    **kwargs, # Which notebooks, for `proc_nbs`
):
    "Let nbdev process the notebooks, all of them anew: a reference can change although its notebook has not"
    if faults := ''.join(map(lost, nbglob(as_path=True))): sys.exit(faults)
    processors._do_eval = needed
    proc_nbs(n_workers=0, force=True, **kwargs)

# Outputs

def html(
    o, # Output of a cell
) -> str|None: # Its HTML, without the styles that fastprogress writes; None if it has none
    s = o.get('data', {}).get('text/html')
    return None if s is None else re.sub(r'<style>[^<]*progress[^<]*</style>', '', s).strip()

def terminal(
    s:str, # Text that was written to a terminal
) -> str: # What is to be seen there: a line is written anew after each carriage return
    s = s.replace('█\r', '')   # by which fastprogress tries whether it can
    return re.sub(r'[^\n]*\r', '', re.sub(r'\r+(?=\n|$)', '', s))

def final(
    outs:list, # Outputs of a cell
    url:str, # Address of its page
) -> list: # Those still to be seen when the cell has run, their links resolved
    "Drop what was overwritten: lines of text before a carriage return, a progress bar by the next HTML"
    res = []
    for o in outs:
        h,data = html(o),o.get('data', {})
        if h is not None and res and '<progress' in (html(res[-1]) or ''): res.pop()
        if h == '': continue
        if h: data['text/html'] = h
        if o.output_type == 'stream':
            o.text = terminal(o.text)
            if not o.text.strip(): continue
        if 'text/markdown' in data: data['text/markdown'] = links(data['text/markdown'], url)
        res.append(o)
    return res

# Cells

_tags = {('echo','false'): 'remove-input', ('output','false'): 'remove-output', ('warning','false'): 'remove-stderr',
    ('code-fold','true'): 'hide-input', ('tpu','true'): 'tpu-only'}

def markdown(source:str) -> dict: # A markdown cell
    return dict(cell_type='markdown', metadata={}, source=source)

def code(
    c, # A code cell
    d:dict, # Its directives
    url:str, # Address of its page
) -> dict: # A code cell for myst-nb
    "Turn directives into tags and metadata, and tidy the outputs"
    show = dict(figure=dict(caption=d['fig-cap'])) if 'fig-cap' in d else {}
    if 'fig-alt' in d: show['image'] = dict(alt=d['fig-alt'])
    tags = [t for (k,v),t in _tags.items() if d.get(k) == v]
    metadata = dict(tags=tags, mystnb=show)
    return dict(cell_type='code', metadata=metadata, source=c.source, outputs=final(c.outputs, url), execution_count=None)

def cells(
    nb, # A notebook processed by nbdev
    url:str, # Address of its page
    div=myst_div, # Function that renders Quarto's divs
    entry=myst_entry, # Function that renders entries of `show_doc`
):
    "The cells that are to be seen"
    for c in nb.cells:
        d = {k: v.strip('"') or 'true' for k,v in c.directives.items()}
        c.remove_directives()
        if c.cell_type == 'raw' or d.get('include') == 'false' or not c.source.strip(): continue
        if 'THIS FILE WAS AUTOGENERATED' in c.source: continue
        if c.cell_type == 'markdown': yield markdown(links(divs(c.source, div), url))
        elif d.get('output') == 'asis':
            for o in c.outputs: yield markdown(entry(o.data['text/markdown'].replace('__main__.', ''), url))
        else: yield code(c, d, url)

# Pages

def header(
    rel:Path, # A notebook, relative to nbs/
    fm:dict, # Its front matter
) -> str: # Title, description, and links to other forms of the page
    repo = f'{cfg.user}/{cfg.repo}/blob/{cfg.branch}/{nbs.name}/{rel.as_posix()}'
    forms = {'Open in Colab': f'https://colab.research.google.com/github/{repo}', 'Notebook': f'https://github.com/{repo}',
        'Markdown': f'{nbpath2html(rel).name}.md'}
    description = [directive('div', 'description', fm['description'])] if 'description' in fm else []
    page_links = directive('div', 'page-links', ' '.join(f'[{k}]({v})' for k,v in forms.items()))
    return '\n\n'.join([f"# {fm.get('title', rel.stem)}", *description, page_links])

def navigation() -> str: # Hidden toctrees
    "The sections of nbs/sidebar.yml, which Quarto shows too"
    res = []
    for o in yaml.safe_load((nbs/'sidebar.yml').read_text())['website']['sidebar']['contents']:
        found = [f for f in sorted(nbs.glob(o['contents'])) if f.name[0] not in '._']
        docs = [nbpath2html(f.relative_to(nbs)).with_suffix('').as_posix() for f in found]
        if docs: res.append(directive('toctree', '', '\n'.join(docs), ':hidden:', f":caption: {o['section']}"))
    return '\n\n'.join(res)

def stage(
    path:Path, # A notebook in _proc/
):
    "Write the notebook that Sphinx is to render"
    nb,rel = read_nb(path),path.relative_to(proc)
    page = nbpath2html(rel)
    res = [markdown(header(rel, nb_frontmatter(nb))), *cells(nb, f'{site}/{page.as_posix()}')]
    if page.name == 'index.html': res.append(markdown(navigation()))
    meta = dict(kernelspec=dict(name='python3', display_name='python3', language='python'), language_info=dict(name='python'))
    (build/'src'/page.with_suffix('.ipynb')).write_text(json.dumps(dict(cells=res, metadata=meta, nbformat=4, nbformat_minor=4)))

def output_md(
    o, # Output of a cell
    save, # Function that saves a picture, given its bytes and suffix, and returns markdown that shows it
) -> str|None: # Markdown: its own, or its table, picture or text
    data = o.get('data') or {'text/plain': o.get('text') or f"{o.get('ename')}: {o.get('evalue')}"}
    plain = data.get('text/plain', '').rstrip()
    if 'text/markdown' in data: return data['text/markdown']
    if '<table' in (html(o) or ''): return re.sub(r'<style.*?</style>\s*', '', html(o), flags=re.S)
    if 'image/svg+xml' in data: return save(data['image/svg+xml'].encode(), 'svg')
    if 'image/png' in data: return save(base64.b64decode(data['image/png']), 'png')
    if plain and not plain.startswith('<IPython.core.display'): return fenced(plain)

def page_md(
    path:Path, # A notebook in _proc/
    save=lambda pic, suffix: None, # Function that saves a picture, and returns markdown that shows it
) -> str: # Its page, in GitHub's markdown
    nb,rel = read_nb(path),path.relative_to(proc)
    fm = nb_frontmatter(nb)
    res = [f"# {fm.get('title', rel.stem)}", f"> {fm['description']}" if 'description' in fm else None]
    for c in cells(nb, f'{site}/{nbpath2html(rel).as_posix()}', gfm_div, gfm_entry):
        tags = c['metadata'].get('tags', [])
        if c['cell_type'] == 'markdown': res.append(c['source'].strip())
        elif 'remove-input' not in tags: res.append(fenced(c['source'], 'python'))
        if 'remove-output' not in tags: res += [output_md(o, save) for o in c.get('outputs', [])]
    return '\n\n'.join(filter(None, res)) + '\n'

# Commands

def not_pictures(folder:str, names:list) -> list: # Names of the files that are not pictures, for `copytree`
    return [o for o in names if Path(folder, o).is_file() and Path(o).suffix not in ('.gif', '.jpg', '.png', '.svg')]

def build_site():
    "Build the site, and put it into _docs/ if there is no fault in it"
    process()
    shutil.rmtree(build, ignore_errors=True)
    src,out,nb_paths = build/'src',build/'html',sorted(proc.rglob('*.ipynb'))
    shutil.copytree(proc, src, ignore=not_pictures)
    for f in nb_paths: stage(f)
    sphinx = [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q', '-c', 'docs', '-d', build/'doctrees', src, out]
    if subprocess.run(sphinx).returncode: sys.exit(1)
    for f in nb_paths: (out/f'{nbpath2html(f.relative_to(proc))}.md').write_text(page_md(f))
    if (nbs/'llms.txt').exists(): shutil.copy(nbs/'llms.txt', out)
    relink(out, site, {o[0] for o in NbdevLookup().syms.values() if isinstance(o, tuple)})
    if check(out, site): sys.exit(1)
    shutil.rmtree(cfg.doc_path, ignore_errors=True)
    shutil.move(out, cfg.doc_path)

def build_readme():
    "Write README.md, and the pictures that its cells have made to index_files/"
    process(file_glob=cfg.readme_nb)
    shutil.rmtree(pics := root/'index_files', ignore_errors=True)
    def save(pic, suffix):
        pics.mkdir(exist_ok=True)
        path = pics/f'{len(list(pics.iterdir()))}.{suffix}'
        path.write_bytes(pic)
        return f'![]({path.relative_to(root)})'
    md = page_md(proc/cfg.readme_nb, save)
    md = re.sub(r'(!\[[^\]]*\]\()(?!https?:|index_files/)', rf'\1{nbs.name}/', md)
    (root/'README.md').write_text(f'<!-- Made from {nbs.name}/{cfg.readme_nb} by docs/build.py. Edit the notebook. -->\n\n{md}')

if __name__ == '__main__': build_readme() if sys.argv[1:] == ['readme'] else build_site()
