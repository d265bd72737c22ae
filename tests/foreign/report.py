"The results as tables"
import pandas as pd
from .compare import bad, verdicts

not_run = ('left out', 'library')

def read(
    path, # CSV file that the runner has written
) -> pd.DataFrame: # A row for each cell
    return pd.read_csv(path, keep_default_na=False)

def per_notebook(
    rows:pd.DataFrame, # From `read`
) -> pd.DataFrame: # A row for each notebook, and their sum: cells run, those that pass on the CPU, of those on XLA, and verdicts of those
    "How many cells pass where"
    run = rows[~rows.verdict.isin(not_run)]
    passes = run[~run.verdict.isin(['fails on CPU too', 'passes only on XLA'])]
    res = pd.crosstab(passes.notebook, passes.verdict)
    res = res[[v for v in verdicts if v in res]]
    res.insert(0, 'pass on XLA', res.sum(axis=1) - res[[v for v in bad if v in res and v != 'differs']].sum(axis=1))
    res.insert(0, 'pass on the CPU', passes.groupby('notebook').size())
    res.insert(0, 'run', run.groupby('notebook').size())
    res.loc['all'] = res.sum()
    return res

def named(
    rows:pd.DataFrame, # From `read`
    *which:str, # Verdicts; by default those of cells that are not as on the CPU
) -> pd.DataFrame: # A row for each cell
    "Cells and what was seen, with the reason where one is known"
    found = rows[rows.verdict.isin(which or (*bad, 'warns'))]
    seen = found.detail.str.slice(0, 300)
    why = [f'{w} (seen: {s})' if w and s else w or s for w,s in zip(found.why, seen)]
    return pd.DataFrame(dict(notebook=found.notebook, cell=found.cell, line=found['first'],
                             verdict=found.verdict, why=why)).reset_index(drop=True)
