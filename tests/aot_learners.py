"Small learners for programs that are compiled ahead of time, and a cache of their own"
import pytest
from fastai.vision.all import *
from fastai_xla.all import *
from common import *

@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch): monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))

def quiet(learn):
    learn.remove_cb(ProgressCallback)
    return learn

def small(**kwargs):
    set_seed(0)
    return quiet(image_learner(**kwargs))
