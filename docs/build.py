"""Build the site, or README.md, from the notebooks, without Quarto.

    python docs/build.py           # nbs/ -> _proc/ -> _build/src/ -> _build/html/ -> _docs/
    python docs/build.py readme    # nbs/index.ipynb -> README.md

nbdev does its usual work first, from `nbs/` to `_proc/`: hidden cells are dropped, exported code is replaced by `show_doc`, symbols in
backticks are linked. `markup.py` rewrites the Quarto markup that is left, and each page is staged in `_build/src/` under the address
that Quarto would give it. Sphinx renders the pages (`conf.py`), any warning being an error. `check.py` makes links to the site's own
address relative and looks up every link, and `search.py` what users type. Only a site without a fault
replaces the one in `_docs/`. Beside each `page.html` there is the
page as markdown, `page.html.md`, which is where the modules' docstrings point.

The navigation is in `nbs/sidebar.yml`. A new notebook needs no entry there: the pattern of its folder finds it."""
import ast, base64, json, os, re, shutil, subprocess, sys, yaml
from pathlib import Path
from fastcore.nbio import nb_frontmatter, read_nb
from fastcore.xtras import fenced
from nbdev.config import get_config, nbpath2html
from nbdev.doclinks import NbdevLookup, nbglob
from nbdev import processors
from nbdev.serve import proc_nbs
from check import check, relink
from search import missed
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

def width(
    outs:list, # Outputs of a cell
) -> dict: # Width at which its first figure was drawn: notebooks keep figures with twice as many pixels
    pngs = [base64.b64decode(o.data['image/png']) for o in outs if 'image/png' in o.get('data', {})]
    return dict(width=f"{int.from_bytes(pngs[0][16:20], 'big')//2}px") if pngs else {}

def code(
    c, # A code cell
    d:dict, # Its directives
    url:str, # Address of its page
) -> dict: # A code cell for myst-nb
    "Turn directives into tags and metadata, and tidy the outputs"
    show = dict(figure=dict(caption=d['fig-cap'])) if 'fig-cap' in d else {}
    if 'fig-alt' in d: show['image'] = dict(alt=d['fig-alt']) | width(c.outputs)
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
) -> str: # Title and description
    description = [directive('div', 'description', fm['description'])] if 'description' in fm else []
    return '\n\n'.join([f"# {fm.get('title', rel.stem)}", *description])

def about(
    rel:Path, # A notebook, relative to nbs/
    fm:dict, # Its front matter
    nb, # The notebook as nbdev has processed it
) -> dict: # What `conf.py` puts above the page and behind it
    repo = f'{cfg.user}/{cfg.repo}/blob/{cfg.branch}/{nbs.name}/{rel.as_posix()}'
    links = {'Notebook': f'https://github.com/{repo}', 'Markdown': f'{nbpath2html(rel).name}.md'}
    if 'pip' in install_cell(nbs/rel): links = {'Open in Colab': f'https://colab.research.google.com/github/{repo}'} | links
    ran = rel.parent.name != 'api' and any(c.cell_type == 'code' and c.outputs for c in nb.cells)
    notes = ['Outputs are from XLA’s CPU device, not from a TPU'] if ran else []
    description = re.sub('[`*]', '', fm.get('description') or '')
    return dict(title=fm.get('title', rel.stem), description=description, keywords=fm.get('keywords'), links=links, notes=notes)

def install_cell(
    path:Path, # A notebook
) -> str: # Source of the cell that installs fastai_xla where it is missing; empty if there is none
    return next((c.source for c in read_nb(path).cells if c.cell_type == 'code' and 'except ImportError: get_ipython()' in c.source), '')

def sidebar_entries() -> list: # Sections of nbs/sidebar.yml: caption, page that they fold into or None, [(text or None, name or pattern)]
    contents = yaml.safe_load((nbs/'sidebar.yml').read_text())['website']['sidebar']['contents']
    entries = [(o.get('section'), o.get('href'), o['contents']) if isinstance(o, dict) else (None, None, [o]) for o in contents]
    return [(s, h, [(e.get('text'), e.get('href') or e['auto']) if isinstance(e, dict) else (None, e) for e in es]) for s,h,es in entries]

def sidebar() -> list: # The same, with the notebooks that patterns find
    "The navigation. A page that is named comes before a pattern that would find it, and one that is not there (yet) is left out"
    entries = sidebar_entries()
    seen = {f for _,h,es in entries for f in [h, *(f for _,f in es)] if f}
    def found(text, name):
        if '*' not in name: return [(text, name)]*(name == 'changelog.ipynb' or (nbs/name).exists())
        files = [f.relative_to(nbs).as_posix() for f in sorted(nbs.glob(name)) if f.name[0] not in '._']
        new = [f for f in files if f not in seen]
        seen.update(new)
        return [(None, f) for f in new]
    return [(s, h, [f for e in es for f in found(*e)]) for s,h,es in entries]

def doc_name(f): return nbpath2html(Path(f)).with_suffix('').as_posix()   # of a notebook, as Sphinx has it

def toctree(caption, pages) -> str: # A hidden toctree
    lines = [f'{t} <{doc_name(f)}>' if t else doc_name(f) for t,f in pages]
    return directive('toctree', '', '\n'.join(lines), ':hidden:', *([f':caption: {caption}'] if caption else []))

def navigation(
    rel:Path, # A notebook, relative to nbs/
) -> str: # Hidden toctrees: on the front page the sections, on a page that a section folds into its pages
    name,sections = rel.as_posix(),[o for o in sidebar() if o[2]]
    if name == 'index.ipynb': return '\n\n'.join(toctree(None if h else s, [(s, h)] if h else ps) for s,h,ps in sections)
    return '\n\n'.join(toctree(None, ps) for _,h,ps in sections if h == name)

def to_come(
    md:str, # Markdown
) -> str: # The same, without links to notebooks that nbs/sidebar.yml names and that are not there yet
    named = {Path(f).name for _,h,es in sidebar_entries() for f in [h, *(f for _,f in es)] if f and '*' not in f and not (nbs/f).exists()}
    return re.sub(r'\[([^\]]*)\]\(([^)\s]*\.ipynb)\)', lambda m: m[1] if Path(m[2]).name in named else m[0], md)

def stage(
    path:Path, # A notebook in _proc/
) -> tuple: # Name of the page, and what `conf.py` needs to know of it
    "Write the notebook that Sphinx is to render"
    nb,rel = read_nb(path),path.relative_to(proc)
    page,fm = nbpath2html(rel),nb_frontmatter(nb)
    for c in nb.cells:
        if c.cell_type == 'markdown': c.source = to_come(c.source)
    res = [markdown(header(rel, fm)), *cells(nb, f'{site}/{page.as_posix()}')]
    if nav := navigation(rel): res.append(markdown(nav))
    meta = dict(kernelspec=dict(name='python3', display_name='python3', language='python'), language_info=dict(name='python'))
    (build/'src'/page.with_suffix('.ipynb')).write_text(json.dumps(dict(cells=res, metadata=meta, nbformat=4, nbformat_minor=4)))
    return page.with_suffix('').as_posix(), about(rel, fm, nb)

def stage_changelog() -> tuple: # Name of its page, and what `conf.py` needs to know of it
    shutil.copy(root/'CHANGELOG.md', build/'src'/'changelog.md')
    words = 'changes, changelog, release notes, new in this version, versions'
    return 'changelog', dict(title='Changes', description=f'What is new in {cfg.lib_name}', keywords=words, links={}, notes=[])

def output_md(
    o, # Output of a cell
    save, # Function that saves a picture, given its bytes and suffix, and returns markdown that shows it
    tables:bool=True, # HTML tables, or their text?
) -> str|None: # Markdown: its own, or its table, picture or text
    data = o.get('data') or {'text/plain': o.get('text') or f"{o.get('ename')}: {o.get('evalue')}"}
    plain = data.get('text/plain', '').rstrip()
    if 'text/markdown' in data: return data['text/markdown']
    if tables and '<table' in (html(o) or ''): return re.sub(r'<style.*?</style>\s*', '', html(o), flags=re.S)
    if 'image/svg+xml' in data: return save(data['image/svg+xml'].encode(), 'svg')
    if 'image/png' in data: return save(base64.b64decode(data['image/png']), 'png')
    if plain and not plain.startswith('<IPython.core.display'): return fenced(plain)

def page_md(
    path:Path, # A notebook in _proc/
    save=lambda pic, suffix: None, # Function that saves a picture, and returns markdown that shows it
    tables:bool=True, # HTML tables, or their text?
) -> str: # Its page, in GitHub's markdown
    nb,rel = read_nb(path),path.relative_to(proc)
    fm = nb_frontmatter(nb)
    res = [f"# {fm.get('title', rel.stem)}", f"> {fm['description']}" if 'description' in fm else None]
    for c in cells(nb, f'{site}/{nbpath2html(rel).as_posix()}', gfm_div, gfm_entry):
        tags = c['metadata'].get('tags', [])
        if c['cell_type'] == 'markdown': res.append(c['source'].strip())
        elif 'remove-input' not in tags: res.append(fenced(c['source'], 'python'))
        if 'remove-output' not in tags: res += [output_md(o, save, tables) for o in c.get('outputs', [])]
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
    (build/'pages.json').write_text(json.dumps(dict([*map(stage, nb_paths), stage_changelog()])))
    sphinx = [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q', '-c', 'docs', '-d', build/'doctrees', src, out]
    if subprocess.run(sphinx).returncode: sys.exit(1)
    for f in nb_paths: (out/f'{nbpath2html(f.relative_to(proc))}.md').write_text(page_md(f))
    if (nbs/'llms.txt').exists(): shutil.copy(nbs/'llms.txt', out)
    relink(out, site, {o[0] for o in NbdevLookup().syms.values() if isinstance(o, tuple)})
    lost_queries = missed(out)
    print(*lost_queries, sep='\n', end='\n'*bool(lost_queries))
    if check(out, site) or lost_queries: sys.exit(1)
    shutil.rmtree(cfg.doc_path, ignore_errors=True)
    shutil.move(out, cfg.doc_path)

def badges() -> str: # Of the README alone: the site asks no other site for anything
    shields = 'https://img.shields.io/badge'
    made = {'docs': ('site', f'{site}/'), 'python': ('3.10–3.13', f'{site}/start.html'), 'torch__xla': ('2.9', f'{site}/start.html'),
        'license': ('Apache--2.0', f'{cfg.git_url}/blob/{cfg.branch}/LICENSE')}
    return '\n'.join(f'[![{k}: {v}]({shields}/{k}-{v}-0a4bff)]({url})'.replace('__', '_', 1) for k,(v,url) in made.items())

def build_readme():
    "Write README.md, and the pictures that its cells have made to index_files/"
    process(file_glob=cfg.readme_nb)
    shutil.rmtree(pics := root/'index_files', ignore_errors=True)
    def save(pic, suffix):
        pics.mkdir(exist_ok=True)
        path = pics/f'{len(list(pics.iterdir()))}.{suffix}'
        path.write_bytes(pic)
        return f'![]({path.relative_to(root)})'
    md = page_md(proc/cfg.readme_nb, save, tables=False)
    title,rest = md.split('\n\n', 1)
    md = f'{title}\n\n{badges()}\n\n{rest}'
    md = re.sub(r'(!\[[^\]]*\]\()(?!https?:|index_files/)', rf'\1{nbs.name}/', md)
    (root/'README.md').write_text(f'<!-- Made from {nbs.name}/{cfg.readme_nb} by docs/build.py. Edit the notebook. -->\n\n{md}')

if __name__ == '__main__': build_readme() if sys.argv[1:] == ['readme'] else build_site()
