"A Siamese network"
setup = "from tests.foreign.recipes.book.common import start; start()"
dropout = False
cell_seconds = 900
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    'Resize(224)': 'Resize(32)',
    'create_head(512*2,': 'create_head(64*2,',
    'create_body(resnet34': 'create_body(resnet34()',
    'fit_one_cycle(4,': 'fit_one_cycle(2,',
}
