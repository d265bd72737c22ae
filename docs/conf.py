"Settings of Sphinx for `build.py`, which stages the pages."
import re
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

html_theme,html_title,html_baseurl = 'furo',cfg.title,cfg.doc_url
html_static_path,html_css_files = ['_static'],['site.css']
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

def visit_math(self, node):
    "Formulas as MathML, which browsers show without any JavaScript"
    tex = re.sub(r'(begin|end)\{(align|equation)\*?\}', r'\1{aligned}', node.astext())
    self.body.append(tex2mathml(tex, as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode

def setup(app):
    app.add_transform(PandocIds)
    app.add_html_math_renderer('mathml', (visit_math, None), (visit_math, None))
