"""Notebooks that others wrote, each run on the CPU and with every Learner put on XLA, and compared cell by cell.

    python -m tests.foreign FOLDER --recipes tests/foreign/recipes/fastai --out results.csv     # FOLDER holds the notebooks
    python -m tests.foreign FOLDER --only 13a_learner 45_collab

- `notebooks`: which cells are run, and the recipe of each notebook
- `prepare`: what is replaced in a process before its first cell: downloads, pretrained weights, learners
- `standins`: small data sets in place of those that would be downloaded
- `observe`: what a cell has left, as numbers and texts
- `child`: one run of one notebook, in a process of its own
- `compare`: two runs, a verdict for each cell
- `report`: the table"""
