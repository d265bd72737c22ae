"Normalization, growing images, predictions of several views"
setup = "from tests.foreign.recipes.book.common import start; start()"
dropout = False
cell_seconds = 900
nudge = 1e-5   # as large as the difference of images that are warped on two devices
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    'Resize(460)': 'Resize(44)',
    'size=224': 'size=32',
    'get_dls(64, 224)': 'get_dls(64, 40)',
    'get_dls(128, 128)': 'get_dls(128, 32)',
    'xresnet50(': 'xresnet18(widen=1/8, ',
    'fit_one_cycle(5,': 'fit_one_cycle(2,',
    'fit_one_cycle(4,': 'fit_one_cycle(2,',
    'fine_tune(5,': 'fine_tune(2,',
}
