"Small learners for programs that are compiled ahead of time, and one cache of these for a run of the tests"
import os
import pytest
from fastai.vision.all import *
from fastai_xla.all import *
from common import *

@pytest.fixture(autouse=True)
def shared_cache(tmp_path_factory, monkeypatch):
    "What several tests compile is compiled once, also where they run in several processes"
    path = tmp_path_factory.getbasetemp()
    if 'PYTEST_XDIST_WORKER' in os.environ: path = path.parent
    monkeypatch.setenv('XDG_CACHE_HOME', str(path/'tpu'))

def quiet(learn):
    learn.remove_cb(ProgressCallback)
    return learn

def small(**kwargs):
    set_seed(0)
    return quiet(image_learner(**kwargs))
