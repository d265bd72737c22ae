"Settings of Sphinx for `build.py`, which stages the pages and says in `_build/pages.json` what stands above and behind each."
import json, re
from html import escape
from pathlib import Path
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from nbdev.config import get_config
from sphinx.transforms import SphinxTransform

cfg = get_config()
project,release,copyright = cfg.title,cfg.version,f'the {cfg.title} contributors'
extensions = ['myst_nb', 'sphinx_copybutton', 'sphinx_design', 'sphinx.ext.githubpages']

nb_execution_mode = 'off'                   # outputs are in the notebooks
nb_merge_streams = True
nb_render_markdown_format = 'myst'
nb_code_prompt_show,nb_code_prompt_hide = 'Show the code','Hide the code'

# What Quarto's markdown has and MyST's has not by itself
myst_enable_extensions = ['amsmath', 'colon_fence', 'deflist', 'dollarmath', 'html_image', 'strikethrough', 'tasklist']
myst_dmath_allow_space = myst_dmath_allow_digits = False     # "$1 and $2" is no formula
myst_all_links_external = True              # build.py has resolved them, and check.py looks them up
# `show_doc` makes a third-level heading anywhere; strikethrough works in HTML only
suppress_warnings = ['myst.header', 'myst.strikethrough']

pages = json.loads((Path(cfg.config_path)/'_build'/'pages.json').read_text())
html_theme,html_title,html_baseurl = 'furo',cfg.title,cfg.doc_url
html_static_path,html_css_files,html_favicon = ['_static'],['site.css'],'_static/favicon.svg'
html_search_scorer = 'docs/_static/scorer.js'
templates_path = ['_templates']
html_sidebars = {'**': ['sidebar/brand.html', 'sidebar/search.html', 'sidebar/scroll-start.html', 'sidebar/navigation.html',
    'sidebar/scroll-end.html', 'project.html']}
html_context = dict(repo=cfg.git_url)
html_use_index = html_copy_source = html_show_sourcelink = False
html_math_renderer = 'mathml'
pygments_dark_style = 'github-dark'
copybutton_selector = 'div:not(.output) > div.highlight > pre'

class PandocIds(SphinxTransform):
    "Give headings the ids that Quarto gives them, so that links to them (nbdev's to symbols, too) fit both builds"
    default_priority = 500
    def apply(self):
        for o in self.document.findall(nodes.section):
            title = re.sub('^[^a-z]+', '', o.next_node(nodes.title).astext().lower())
            i = '-'.join(re.sub(r'[^\w\s.-]', '', title).split())
            if i and i not in self.document.ids:
                o['ids'].insert(0, i)
                self.document.ids[i] = o

class Meta(SphinxTransform):
    "Description and keywords of a page: for search engines, and the keywords for the site's own search, too"
    default_priority = 500
    def apply(self):
        page = pages.get(self.env.docname, {})
        url = f"{cfg.doc_url.rstrip('/')}/{self.env.docname}.html"
        props = {'og:title': page.get('title'), 'og:description': page.get('description'), 'og:type': 'website', 'og:url': url,
            'og:site_name': cfg.title}
        words = ', '.join(dict.fromkeys(re.findall(r'\w+', page.get('keywords') or '')))   # a phrase would be one word to the search
        metas = [dict(name=k, content=v) for k,v in (('description', page.get('description')), ('keywords', words)) if v]
        self.document += [nodes.meta('', **o) for o in metas + [dict(property=k, content=v) for k,v in props.items() if v]]

def add_links(
    app, pagename, templatename,
    context:dict, # Of the page's template
    doctree,
):
    "Below a page's title, and so out of the search index: other forms of it, and on which device it was run"
    page = pages.get(pagename)
    if not page or 'body' not in context: return
    links = [f'<a href="{escape(v)}">{escape(k)}</a>' for k,v in page['links'].items()] + [f'<span>{o}</span>' for o in page['notes']]
    if links: context['body'] = context['body'].replace('</h1>', f'</h1>\n<p class="page-links">{" ".join(links)}</p>', 1)

def visit_math(self, node):
    "Formulas as MathML, which browsers show without any JavaScript"
    tex = re.sub(r'(begin|end)\{(align|equation)\*?\}', r'\1{aligned}', node.astext())
    self.body.append(tex2mathml(tex, as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode

def setup(app):
    app.add_transform(PandocIds)
    app.add_transform(Meta)
    app.connect('html-page-context', add_links)
    app.add_html_math_renderer('mathml', (visit_math, None), (visit_math, None))
