"Ratings"
setup = "from tests.foreign.recipes.book.common import start; start(bs=32)"
dropout = False
cell_seconds = 900
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    'fit_one_cycle(5,': 'fit_one_cycle(3,',
    'Silence of the Lambs, The (1991)': 'Movie 3 (1995)',
}
