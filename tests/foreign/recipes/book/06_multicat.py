"Several labels, then points"
setup = "from tests.foreign.recipes.book.common import start; start()"
dropout = False
cell_seconds = 900
nudge = 1e-5   # as large as the difference of images that are warped on two devices
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    'RandomResizedCrop(128,': 'RandomResizedCrop(32,',
    'fine_tune(3, base_lr=3e-3, freeze_epochs=4)': 'fine_tune(2, base_lr=3e-3, freeze_epochs=1)',
    'size=(240,320)': 'size=(24,32)',
    'fine_tune(3, lr)': 'fine_tune(2, lr)',
    'lr = 1e-2': 'lr = 1e-4',
}
on_cpu = 'a model that is on XLA and a batch on the CPU, an error as on a GPU after a fit; it says what to type'
known = {'activs = learn.model(x)': on_cpu, 'activs[0]': on_cpu}
