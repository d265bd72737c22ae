"Presizing, cross-entropy, learning rates, confusion"
setup = "from tests.foreign.recipes.book.common import start; start()"
dropout = False
cell_seconds = 900
nudge = 1e-5   # as large as the difference of images that are warped on two devices
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    'Resize(460)': 'Resize(44)',
    'size=224': 'size=32',
    'sz=224': 'sz=32',
    "(Path.cwd()/'images'/'grizzly.jpg')": "image_bear()",
    'hide_index()': "hide(axis='index')",
    'fit_one_cycle(6,': 'fit_one_cycle(2,',
    'fit_one_cycle(12,': 'fit_one_cycle(3,',
    'fine_tune(6, freeze_epochs=3)': 'fine_tune(2, freeze_epochs=1)',
}
small = 'of all weights one, a bias of BatchNorm, is 1e-5 after an epoch, and 1e-6 apart'
known = {
    '.to_fp16()': 'to_fp16 is float16 on the CPU and bfloat16 on XLA, which the warning says',
    'learn = vision_learner(dls, resnet34, metrics=error_rate)\nlearn.fine_tune(2)': small,
    'learn.get_preds(dl=[(x,y)])': small,
    'ClassificationInterpretation.from_learner(learn)': small,
}
