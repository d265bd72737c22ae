"What a convnet looks at"
setup = "from tests.foreign.recipes.book.common import start; start()"
dropout = False
cell_seconds = 900
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    'Resize(224)': 'Resize(48)',
    'resnet34,': 'resnet34, lin_ftrs=[64],',
    'x.cuda()': 'x.to(dls.device)',
}
