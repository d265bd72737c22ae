"""Make the links of the built site relative, and look up every one.

    python docs/check.py _docs     # exits with 1 and a list where something is broken

A link is any `href` or `src`. What stays on the site must lead to a file that exists and, where an anchor is named, to an element with
that id. Links to other sites are not fetched, but scripts and styles must not come from there."""
import re, sys
from functools import partial
from html.parser import HTMLParser
from os.path import normpath, relpath
from pathlib import Path
from urllib.parse import unquote, urlsplit
from nbdev.config import get_config

class Page(HTMLParser):
    "Ids and links of an HTML file"
    def __init__(self,
        path:Path, # HTML file
    ):
        super().__init__()
        self.ids,self.links = {'', 'top'},[]
        self.feed(path.read_text(encoding='utf-8'))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.add(attrs.get('id'))
        if attrs.get('rel') != 'canonical': self.links += [(tag, attrs[k]) for k in ('href', 'src') if attrs.get(k)]

def pages(
    out:Path, # Folder of the site
) -> dict: # Path of each page in the site -> `Page`
    return {f.relative_to(out).as_posix(): Page(f) for f in sorted(out.rglob('*.html'))}

def relink(
    out:Path, # Folder of the site
    site:str, # Its address
    symbols:set, # Addresses that nbdev links symbols to
):
    "Make links to the site's own address relative. A symbol without an entry of its own, say a method, leads to its class or else its page"
    ps = pages(out)
    def relative(m, name):
        path,anchor = m[2] or 'index.html',m[3] or ''
        if f'{site}/{path}#{anchor}' in symbols and path in ps:
            while anchor not in ps[path].ids: anchor = anchor.rpartition('.')[0]
        return f'{m[1]}{relpath(path, Path(name).parent)}{anchor and "#"}{anchor}"'
    for name in ps:
        text = (out/name).read_text(encoding='utf-8')
        text = re.sub(rf'(<a [^>]*?href="){re.escape(site)}(?:/([^"#]*))?(?:#([^"]*))?"', partial(relative, name=name), text)
        (out/name).write_text(text, encoding='utf-8')

def fault(
    tag:str, # Name of an HTML element
    link:str, # Its link
    name:str, # Path of its page in the site
    ps:dict, # Pages of the site
    out:Path, # Folder of the site
    site:str, # Its address
) -> str: # What is wrong with the link; empty if nothing is
    u = urlsplit(link)
    if f'{link}/'.startswith(f'{site}/'): return 'absolute link to the site itself'
    if u.scheme or u.netloc: return 'from another site' if tag in ('script', 'link') else ''
    path = normpath(Path(name).parent/unquote(u.path)) if u.path else name
    if not (out/path).is_file(): return 'no such file'
    return 'no such anchor' if path in ps and unquote(u.fragment) not in ps[path].ids else ''

def check(
    out:Path, # Folder of the site
    site:str, # Its address
) -> int: # How many links are broken
    "Look up every link, and print what is broken and how many there are"
    ps = pages(out)
    found = [(name, link, fault(tag, link, name, ps, out, site)) for name,p in ps.items() for tag,link in p.links]
    bad = [f'{name}: {link}: {why}' for name,link,why in found if why]
    print(*bad, f'{len(ps)} pages, {len(found)} links, {len(bad)} broken', sep='\n')
    return len(bad)

if __name__ == '__main__': sys.exit(min(check(Path(sys.argv[1]), get_config().doc_url.rstrip('/')), 1))
