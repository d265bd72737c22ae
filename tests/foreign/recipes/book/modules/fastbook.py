"What the chapters use of the package `fastbook`, which is not installed here: helpers that draw, and two pictures"
import math, os, random, re, shutil, string, sys, tempfile
from types import SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from PIL import Image as _Image
from fastai.vision.all import *
from IPython.display import display
from pandas.api.types import CategoricalDtype

widgets = SimpleNamespace(FileUpload=lambda: SimpleNamespace(data=[]))

def setup_book(): pass

def gv(s): return f'digraph {{{s}}}'

def plot_function(f, tx=None, ty=None, title=None, min=-2, max=2, figsize=(6, 4)):
    x = torch.linspace(min, max, 100)
    _,ax = plt.subplots(figsize=figsize)
    ax.plot(x, f(x))
    ax.set(xlabel=tx, ylabel=ty, title=title)

def get_image_files_sorted(path, recurse=True, folders=None): return get_image_files(path, recurse, folders).sorted()

def _drawn(name, color):
    path = Path(tempfile.gettempdir())/name
    _Image.new('RGB', (60, 52), color).save(path)
    return path

def image_cat(): return _drawn('fastbook_cat.jpg', (200, 120, 60))
def image_bear(): return _drawn('fastbook_bear.jpg', (90, 60, 30))

def draw_tree(t, df, size=10, ratio=.6, precision=0, **kwargs): return f'{t.get_n_leaves()} leaves'

def cluster_columns(df, figsize=(10, 6), font_size=12): return df.corr('spearman')
