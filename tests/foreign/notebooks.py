"Which cells of a notebook are run, and the recipe that says what to change"
import json, re, runpy
from dataclasses import dataclass, field
from pathlib import Path

flags = 'default_exp|export|exports|exporti|export_and_show|hide|hide_input|hide_output|eval|slow|cuda|cpp|distributed'
directive = re.compile(rf'^\s*#\s*(?:\|\s*([\w-]+)|({flags})\b):?\s*(.*?)\s*$')   # `#| export`, and `#export` of older notebooks

@dataclass
class Cell:
    number:int           # Position in the notebook, from 0, texts counted
    source:str
    directives:dict = field(default_factory=dict)   # `export` -> '', `eval` -> 'false'
    left_out:str = ''    # Why it is not run
    known:str = ''       # Why it differs
    @property
    def first(self): return next((l.strip() for l in self.source.splitlines() if l.strip() and not directive.match(l)), '')[:100]

@dataclass
class Recipe:
    "What is written in a recipe's file, each a plain name; all of them may be missing"
    skip:dict = field(default_factory=dict)      # Text in a cell -> why the cell is left out
    replace:dict = field(default_factory=dict)   # Text in a cell -> what stands there instead
    known:dict = field(default_factory=dict)     # Text in a cell -> why it differs
    setup:str = ''        # Code that is run before the first cell
    dropout:bool = True   # `False` turns dropout off in both runs, so that numbers can be compared
    flags:str = ''        # Cells with these directives are run, which otherwise are left out: 'slow'
    module:str = ''       # Installed module with the names of the exported cells; by default the one that `default_exp` names
    cell_seconds:int = 900   # Time limit of a cell
    nudge:float = 1e-7       # How large rounding is, relative: 1e-5 where batches are warped on the device

def directives(source):
    found = {}
    for line in source.splitlines():
        if not line.strip(): continue
        if not line.lstrip().startswith('#'): break
        if m := directive.match(line): found[m[1] or m[2]] = m[3]
    return found

def is_export(cell): return any(k.startswith('export') for k in cell.directives)

def read_recipe(path):
    if path is None or not Path(path).exists(): return None
    names = runpy.run_path(str(path))
    return Recipe(**{k: names[k] for k in Recipe.__dataclass_fields__ if k in names})

def _changed(cells, recipe):
    for old,new in recipe.replace.items():
        held = [c for c in cells if old in c.source]
        if not held: raise ValueError(f"The recipe replaces {old!r}, which no cell holds")
        for c in held: c.source = c.source.replace(old, new)

def _tell(cells, attr, texts):
    for text,why in texts.items():
        held = [c for c in cells if text in c.source]
        if not held: raise ValueError(f"The recipe speaks of {text!r}, which no cell holds")
        for c in held: setattr(c, attr, why)

def _leave_out(cells, recipe):
    wanted = recipe.flags.split()
    for c in cells:
        flagged = [f for f in ('slow', 'cuda', 'distributed', 'cpp') if f in c.directives and f not in wanted]
        if c.directives.get('eval', '').lower() == 'false' and 'eval' not in wanted: c.left_out = c.left_out or 'marked `eval: false`'
        if flagged: c.left_out = c.left_out or f'marked `{flagged[0]}`'
        if not c.first: c.left_out = c.left_out or 'empty'

def read_cells(path, recipe):
    "The code cells of the notebook at `path`, and the installed module that its exported cells have become"
    raw = Path(path).read_text()
    if not raw.strip(): return [],''
    cells = []
    for i,c in enumerate(json.loads(raw)['cells']):
        if c['cell_type'] != 'code': continue
        source = ''.join(c['source'])
        cells.append(Cell(i, source, directives(source)))
    module = recipe.module or next((f"fastai.{c.directives['default_exp']}" for c in cells if c.directives.get('default_exp')), '')
    _changed(cells, recipe)
    _tell(cells, 'left_out', recipe.skip)
    _tell(cells, 'known', recipe.known)
    _leave_out(cells, recipe)
    return cells,module
