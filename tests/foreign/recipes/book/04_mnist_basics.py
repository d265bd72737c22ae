"Threes and sevens by hand, then by a Learner"
setup = "from tests.foreign.recipes.book.common import start; start(bs=32)"
dropout = False
cell_seconds = 900
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    'fit(40, 0.1)': 'fit(10, 0.1)',
}
