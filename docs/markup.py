"""Rewrites Quarto's markdown, as far as the notebooks use it, for Sphinx (MyST) and for GitHub.

The notebooks are written for Quarto, so that `nbdev-docs` works where Quarto is installed. Little Quarto markup is left when nbdev has
processed them: fenced divs (callouts and tabsets), attributes on links, links to notebooks, and the entries of `show_doc`. A div must
begin and end in the same cell. References to figures (`@fig-...`) and `.qmd` pages are not supported."""
import re
from pathlib import Path
from urllib.parse import urljoin
from nbdev.config import nbpath2html

def divs(
    md:str, # Markdown with Quarto's fenced divs
    render, # Function from a div's attributes and its body, already rewritten, to markdown
) -> str: # Markdown without them
    "Render fenced divs, the inner before the outer; what looks like one in a code block is left alone"
    stack,fence = [('', [])],''
    for l in md.splitlines():
        if m := re.match(r'\s*(```+|~~~+)', l): fence = m[1] if not fence else '' if m[1].startswith(fence) else fence
        m = None if fence else re.fullmatch(r':{3,}\s*(.*?)[\s:]*', l)
        if not m: stack[-1][1].append(l)
        elif m[1]: stack.append((m[1], []))
        elif len(stack) > 1:
            attrs,body = stack.pop()
            stack[-1][1].append(render(attrs, '\n'.join(body)))
        else: raise ValueError(f"There is a ::: too many here:\n{md}")
    if len(stack) > 1: raise ValueError(f"A ::: is not closed here; a div must begin and end in the same cell:\n{md}")
    return '\n'.join(stack[0][1])

def directive(
    name:str, # Name of a MyST directive, e.g. 'note'
    arg:str, # What stands on its first line
    body:str, # What it contains, which may be directives
    *options:str, # Its options, e.g. ':class: tip'
) -> str: # MyST
    "A directive, its fence longer than those inside"
    fence = ':'*(1 + max([2, *map(len, re.findall('^:+', body, re.M))]))
    return '\n'.join([f'{fence}{{{name}}} {arg}'.rstrip(), *options, '', body.strip('\n'), fence])

def callout(
    attrs:str, # Attributes of a div
    body:str, # Its body
) -> tuple|None: # Kind, title and body of a callout; None for another div
    "Take a callout apart: its title is an attribute, or a heading that it opens with"
    if not (kind := re.search(r'callout-(\w+)', attrs)): return
    if title := re.search(r'title="([^"]*)"', attrs): return kind[1], title[1], body
    if title := re.match(r'\s*#+ +(.*)\n?', body): return kind[1], title[1], body[title.end():]
    return kind[1], '', body

def tabs(body:str) -> str: # MyST
    "A tabset: its tabs begin with headings of the level of the first"
    level = re.search('^#+ ', body, re.M)[0]
    parts = re.split(rf'^{level}(.*)$', body, flags=re.M)[1:]
    return directive('tab-set', '', '\n'.join(directive('tab-item', *tab) for tab in zip(parts[::2], parts[1::2])))

def myst_div(attrs:str, body:str) -> str: # MyST
    "A callout or a tabset; any other div leaves its body"
    if 'panel-tabset' in attrs: return tabs(body)
    if not (found := callout(attrs, body)): return body
    kind,title,body = found
    title = title or kind.capitalize()
    if re.search('collapse="?true', attrs): return directive('dropdown', title, body)
    return directive('admonition', title, body, f':class: {kind}')

def gfm_div(attrs:str, body:str) -> str: # GitHub's markdown
    "A callout as an alert; any other div leaves its body"
    if not (found := callout(attrs, body)): return body
    kind,title,body = found
    lines = ([f'**{title}**', ''] if title else []) + body.strip('\n').splitlines()
    return '\n'.join(f'> {l}'.rstrip() for l in [f'[!{kind.upper()}]', *lines])

def links(
    md:str, # Markdown
    url:str, # Address of its page
) -> str: # Markdown whose links have no attributes, and lead to pages instead of notebooks
    def page(m): return f"]({urljoin(url, nbpath2html(Path(m[1])).as_posix())}{m[2] or ''})"
    md = re.sub(r'(\]\([^)\s]*\))\{[^}\n]*\}', r'\1', md)
    return re.sub(r'\]\((?![a-z]+:)([^)\s#]+\.ipynb)(#[^)\s]*)?\)', page, md)

def parameters(
    md:str, # Signature and description, as `show_doc` gives them
) -> str: # The same; comments on parameters are a table below the description
    "A parameter of `show_doc`'s signature is a line `name:type=default, # comment`, which may go on in lines of comment"
    found = re.fullmatch(r'(```python\ndef )([\w.]+)\(\n(.*?)\n\)(?:->(.*?))?:(?: # ([^\n]*))?\n```(.*)', md, re.S)
    if not found: return md
    head,name,body,returns,returned,rest = found.groups()
    rows,sig = [],[]
    for l in re.sub(r'\n\s*# ', ' ', body).splitlines():
        code,_,comment = l.strip().partition(' # ')
        m = re.fullmatch(r'(\**\w+)(?::(.*?))?(?:=(.*?))?,?', code)
        sig.append(code if comment and m and m[1] != 'self' else l.strip())
        if comment and m: rows.append((m[1], m[2] or '', m[3] or '', comment))
    if returned: rows.append(('*returns*', returns or '', '', returned))
    if not rows: return md
    def cell(o, code=True): return f"`{o}`".replace('|', '\\|') if o and code and not o.startswith('*returns') else o.replace('|', '\\|')
    lines = [f'| {cell(n)} | {cell(t)} | {cell(d)} | {cell(c, False)} |' for n,t,d,c in rows]
    table = '\n'.join(['| | type | default | |', '|---|---|---|---|', *lines])
    line = f"{' '.join(sig).rstrip(',')}"
    line = line if len(line) < 80 else '\n    ' + '\n    '.join(sig) + '\n'
    return f"{head}{name}({line}){f'->{returns}' if returns else ''}:\n```{rest.rstrip()}\n\n{table}"

def myst_entry(md:str, url:str) -> str: # MyST
    "An entry of `show_doc`: its heading, and in a box the link to the source, the signature, the description and its parameters"
    source,heading,rest = re.fullmatch(r'(?:---)?\s*(\[source\]\S+)?\s*(#+ [^\n]*)\n(.*)', links(md, url), re.S).groups()
    body = parameters(rest.strip())
    return f'{heading}\n\n' + directive('div', 'api', (directive('div', 'source', source) + '\n\n' if source else '') + body)

def gfm_entry(md:str, url:str) -> str: # GitHub's markdown
    return links(md, url).removeprefix('---').strip()
