"Optimizers and callbacks by hand"
setup = "from tests.foreign.recipes.book.common import start; start()"
dropout = False
cell_seconds = 900
nudge = 1e-5   # as large as the difference of images that are warped on two devices
replace = {
    'learn.lr_find()': 'learn.lr_find(stop_div=False)',   # else it ends early, and later epochs are shuffled otherwise
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    '.to_fp16()': '',
    'URLs.IMAGENETTE_160, 160, 128': 'URLs.IMAGENETTE_160, 44, 32',
    'fit_one_cycle(3,': 'fit_one_cycle(2,',
}
