"Optimizers and callbacks by hand"
setup = "from tests.foreign.recipes.book.common import start; start()"
dropout = False
cell_seconds = 900
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    '.to_fp16()': '',
    'URLs.IMAGENETTE_160, 160, 128': 'URLs.IMAGENETTE_160, 44, 32',
    'fit_one_cycle(3,': 'fit_one_cycle(2,',
}
