"A language model, then a classifier"
setup = "from tests.foreign.recipes.book.common import start; start()"
dropout = False
cell_seconds = 900
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook': '',
    'files[0].open().read()': 'files[0].read_text()',
    'o.open().read()': 'o.read_text()',
    'bs=128, seq_len=80': 'bs=8, seq_len=12',
    'bs=128, seq_len=72': 'bs=8, seq_len=72',
    'fit_one_cycle(10, 2e-3)': 'fit_one_cycle(2, 2e-3)',
}
skip = {
    'sp = SubwordTokenizer': 'sentencepiece is not installed',
    'subword(1000)': 'sentencepiece is not installed',
    'subword(200)': 'sentencepiece is not installed',
    'subword(10000)': 'sentencepiece is not installed',
}
low = 'to_fp16 is float16 on the CPU and bfloat16 on XLA, which the warning says; without it these cells agree to rounding'
known = {'.to_fp16()': low, 'learn.fit_one_cycle(1, 2e-2)': low, 'learn.unfreeze()': low, 'learn.freeze_to(': low}
