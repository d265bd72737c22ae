"ResNets by hand"
setup = "from tests.foreign.recipes.book.common import start; start()"
dropout = False
cell_seconds = 900
nudge = 1e-5   # as large as the difference of images that are warped on two devices
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    '.to_fp16()': '',
    'learn.lr_find()': 'learn.lr_find(stop_div=False)',   # else it ends early, and later epochs are shuffled otherwise
    'URLs.IMAGENETTE_160, 160, 128': 'URLs.IMAGENETTE_160, 44, 32',
    'presize=320, resize=224': 'presize=44, resize=40',
    '[64, 64, 128, 256, 512]': '[64, 16, 16, 32, 64]',
    '[2,2,2,2]': '[1,1,1,1]',
    '[3,4,6,3], 4': '[1,1,1,1], 4',
    'fit_one_cycle(5,': 'fit_one_cycle(2,',
    'fit_one_cycle(20,': 'fit_one_cycle(2,',
}
