"Transforms, pipelines, pairs of images"
setup = "from tests.foreign.recipes.book.common import start; start()"
dropout = False
cell_seconds = 900
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    'o.open().read()': 'o.read_text()',
    'Resize(224)': 'Resize(32)',
}
