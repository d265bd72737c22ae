"`learn.cbs` holds the user's callbacks, as without XLA"
from fastai.vision.all import *
from fastai_xla.all import *
from common import image_learner

class Own(Callback): "Does nothing"

def test_callbacks_are_counted_as_without_xla():
    cpu,xla = image_learner(cbs=Own()),image_learner(cbs=Own()).to_xla()
    assert [type(cb) for cb in xla.cbs] == [type(cb) for cb in cpu.cbs]
    assert isinstance(xla.cbs[-1], Own)

def test_training_goes_on_where_the_list_of_callbacks_is_replaced():
    learn = image_learner(cbs=Own()).to_xla()
    learn.cbs = L(cb for cb in learn.cbs if not isinstance(cb, (Own, ProgressCallback)))
    with learn.no_logging(): learn.fit(2, 1e-2)
    steady = learn.xla_report().per_batch('training')
    assert (steady['compiles'],steady['to host']) == (0, 0), steady

def test_copies_and_detached_learners_have_their_own():
    learn = image_learner().to_xla()
    other = deepcopy(learn)
    assert other.xla_opt is not learn.xla_opt and other.xla_opt.learn is other
    cb = learn.xla_opt
    learn.detach_xla()
    assert not hasattr(learn, 'xla_opt') and cb.learn is None
    learn.to_xla()
    assert learn.xla_opt.learn is learn
