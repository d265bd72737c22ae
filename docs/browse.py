"""Open every page of the built site in headless Chromium, and tell what is wrong.

    python docs/browse.py _docs [folder for screenshots]

At the width of a phone and of a desk, light and dark: nothing scrolls sideways, nothing is written to the console, no picture is
missing or shown far from the size at which it was drawn, no table or code block is cut where there is room beside it, and nothing is
asked of another site. Then the queries of `queries.txt` are typed, a cell is copied, and the sidebar is followed from end to end.
Needs `pip install playwright` and a Chromium, which `CHROMIUM` names."""
import functools, http.server, itertools, os, re, sys, threading
from pathlib import Path
from urllib.parse import urljoin
from playwright.sync_api import sync_playwright
from search import queries

wide = """() => {
  const boxes = [...document.querySelectorAll('article pre, article .table-wrapper, article .output')]
  const cut = boxes.filter(o => o.scrollWidth > o.clientWidth + 1)
  const right = document.querySelector('article')?.getBoundingClientRect().right
  const room = o => right - o.getBoundingClientRect().right > 40
  return {scroll: document.documentElement.scrollWidth - innerWidth, cut: cut.filter(room).map(o => o.textContent.trim().slice(0, 60)),
    missing: [...document.images].filter(o => o.complete && !o.naturalWidth).map(o => o.src),
    size: [...document.querySelectorAll('.cell_output img')].map(o => [o.naturalWidth/o.clientWidth, o.naturalWidth, o.clientWidth])
      .filter(([r]) => innerWidth > 1000 && (r > 3.1 || r < .99)).map(o => o.map(Math.round).join(' '))}
}"""

def serve(out):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=str(out)))
    server.handle_error = lambda *args: None   # a page that is left does not wait for its files
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f'http://127.0.0.1:{server.server_port}/'

def look(browser, url, names, shots):
    page,said = browser.new_page(),[]
    page.on('console', lambda m: said.append(f'console: {m.text}'))
    page.on('requestfailed', lambda r: said.append(f'failed: {r.url}'))
    page.on('request', lambda r: r.url.startswith((url, 'data:')) or said.append(f'asks another site: {r.url}'))
    for name in names:
        page.goto(url+name)
        for width,scheme in itertools.product((390, 1440), ('light', 'dark')):
            page.set_viewport_size(dict(width=width, height=900))
            page.emulate_media(color_scheme=scheme)
            found = page.evaluate(wide)
            if found['scroll'] > 0: said.append(f"scrolls sideways by {found['scroll']}")
            said += [f'{k}: {o}' for k in ('cut', 'missing', 'size') for o in found[k]]
            for o in said: yield f'{name} at {width}, {scheme}: {o}'
            said.clear()
            if shots: page.screenshot(path=shots/f"{name.replace('/', '_')}_{width}_{scheme}.png")
    page.close()

def search(page, url, there):
    for q,right in queries():
        right = [p for p in right if f'{p}.html' in there]
        if not right: continue
        page.goto(f'{url}search.html?q={q}')
        page.wait_for_function("/found|did not match/i.test(document.querySelector('.search-summary')?.innerText)")   # a summary, at last
        found = page.eval_on_selector_all('ul.search > li > a', 'os => os.map(o => new URL(o.href).pathname.slice(1).replace(".html", ""))')
        if not set(right) & set(list(dict.fromkeys(found))[:3]): yield f'search for "{q}": {right} is not among {found[:3]}'

def copies(page, url):
    page.goto(f'{url}start.html')
    page.locator('.highlight').first.hover()
    page.locator('button.copybtn').first.click()
    text = page.evaluate('navigator.clipboard.readText()')
    if 'pip install' not in text: yield f'the copy button of Start copies {text!r}'

def sidebar(page, url):
    page.goto(url)
    links = page.eval_on_selector_all('.sidebar-tree a.internal', 'os => os.map(o => o.href)')
    if len(links) < 20: yield f'the sidebar has {len(links)} links'
    listed,passed,at = {l.split('#')[0] for l in links},[],url
    while at:   # from each page to the next one
        res = page.request.get(at)
        if res.status != 200: yield f'the sidebar leads to {at}'
        passed.append(at)
        found = re.search(r'class="next-page" href="([^"#]+)', res.text())
        at = urljoin(at, found[1]) if found else None
    if lost := sorted(listed-{*passed}-{f'{url}index.html'}): yield f'who follows the pages from the first to the last does not meet {lost}'

def browse(
    out:Path, # Folder of the site
    shots:Path|None=None, # Folder for screenshots
) -> list: # What is wrong
    names,url = [f.relative_to(out).as_posix() for f in sorted(out.rglob('*.html')) if f.name not in ('search.html', '404.html')],serve(out)
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=os.environ.get('CHROMIUM', '/usr/bin/chromium'), args=['--no-sandbox'])
        faults = list(look(browser, url, names, shots))
        context = browser.new_context(permissions=['clipboard-read', 'clipboard-write'])
        page = context.new_page()
        faults += [*search(page, url, names), *copies(page, url), *sidebar(page, url)]
        browser.close()
    return faults

if __name__ == '__main__':
    faults = browse(Path(sys.argv[1]).resolve(), *map(Path, sys.argv[2:]))
    print(*faults, f'{len(faults)} faults', sep='\n')
    sys.exit(min(len(faults), 1))
