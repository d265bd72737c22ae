"Pets, a U-Net, texts, a table, ratings"
setup = "from tests.foreign.recipes.book.common import start; start()"
dropout = False
cell_seconds = 900
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    'Resize(224)': 'Resize(32)',
    'fine_tune(8)': 'fine_tune(2)',
    'fine_tune(4, 1e-2)': 'fine_tune(2, 1e-2)',
    'fine_tune(10)': 'fine_tune(2)',
    "'images/chapter1_cat_example.jpg'": "image_cat()",
}
texts = ('RNNRegularizer takes a mean over the columns of a batch, and on XLA a batch is padded to one of four lengths; '
    'without it the losses agree to 1e-6. Predictions on the CPU leave out a chunk of a text that begins later than longer ones '
    'and ends with them; on XLA such a text gets what it gets alone')
known = {'learn = text_classifier_learner(': texts, 'learn.predict("I really liked that movie!")': texts}
