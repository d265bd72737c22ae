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
