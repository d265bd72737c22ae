"Recurrent networks by hand"
setup = "from tests.foreign.recipes.book.common import start; start(bs=64)"
dropout = False
cell_seconds = 900
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    'bs = 64': 'bs = 16',
    'bs=64': 'bs=16',
    'fit_one_cycle(10,': 'fit_one_cycle(3,',
    'fit_one_cycle(15,': 'fit_one_cycle(3,',
}
