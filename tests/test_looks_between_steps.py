"With several steps as one: schedulers and metrics of the user's that look at what each of the steps leaves"
import pytest, torch
from fastai.callback.schedule import LRFinder
from fastai.vision.all import *
from common import image_learner
from test_several_unseen import agrees

class TrainMetrics(Callback):
    order = -100
    def before_fit(self): self.learn.recorder.train_metrics = True

class OfLoss(ParamScheduler):
    "The next step is smaller where the last one's loss was"
    def __init__(self): super().__init__({})
    def before_batch(self): self.learn.opt.set_hyper('lr', 1e-2*(1 + min(1., float(self.learn.loss))) if self.train_iter else 1e-2)
class OfLossAfter(ParamScheduler):
    def __init__(self): super().__init__({})
    def before_batch(self): pass
    def after_batch(self):
        if self.training: self.learn.opt.set_hyper('lr', 1e-2*(1 + min(1., float(self.learn.loss))))

@pytest.mark.parametrize('cb,why', [(OfLoss, 'OfLoss looks at each batch'), (OfLossAfter, 'OfLossAfter looks at each batch'),
                                    (lambda: ParamScheduler({'lr': SchedLin(1e-2, 1e-3)}), None)], ids='before after fastai'.split())
def test_a_scheduler_of_the_users_sets_numbers_by_the_loss(cb, why):
    agrees(lambda: (dict(cbs=cb()), lambda learn: learn.recorder.lrs), why)

class Finds(LRFinder):
    def after_batch(self):
        super().after_batch()
        self.seen = [*getattr(self, 'seen', []), float(self.model[0].weight.norm())]
def test_a_learning_rate_finder_of_the_users_looks_at_weights(tmp_path):
    def story():
        cb = Finds(num_it=9, stop_div=False)
        return dict(cbs=cb, path=tmp_path),lambda learn: cb.seen
    agrees(story, 'Finds may look at')

class Seeing(Metric):
    "Of training too, where the recorder is asked for that"
    def reset(self): self.seen = []
    @property
    def value(self): return sum(self.seen)/max(1, len(self.seen))
class Weights(Seeing):
    def accumulate(self, learn): self.seen.append(float(learn.model[0].weight.norm()))
class State(Seeing):
    def accumulate(self, learn): self.seen += [float(s['grad_avg'].norm()) for s in learn.opt.state.values() if 'grad_avg' in s]
class Held(Seeing):
    def __init__(self, module): self.module = module
    def accumulate(self, learn): self.seen.append(float(self.module.weight.norm()))
class Again(Seeing):
    "The loss of the batch with the new weights"
    def accumulate(self, learn):
        with torch.no_grad(): self.seen.append(float(F.mse_loss(learn.model(learn.x), learn.y)))
class Batches(Seeing):
    def accumulate(self, learn): self.seen.append(float(learn.x.mean() + learn.pred.mean()))

def met_story(make):
    def story():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        return dict(model=model, metrics=make(model), cbs=TrainMetrics()),lambda learn: [list(v) for v in learn.recorder.values]
    return story

@pytest.mark.parametrize('make', [lambda m: Weights(), lambda m: State(), lambda m: Held(m[0]), lambda m: Again()],
                         ids='weights state held again'.split())
def test_a_metric_of_training_looks_at_what_a_step_leaves(make): agrees(met_story(make), 'let a metric of yours look at')

def test_a_metric_of_training_looks_at_batches(): agrees(met_story(lambda m: Batches()), None)

class Smooth(AvgSmoothLoss):
    def accumulate(self, learn):
        super().accumulate(learn)
        self.seen = [*getattr(self, 'seen', []), float(learn.model[0].weight.norm())]
class PutsSmooth(Callback):
    order = -100
    def before_fit(self): self.learn.recorder.smooth_loss = Smooth()
def test_a_smooth_loss_of_the_users_looks_at_weights():
    agrees(lambda: (dict(cbs=PutsSmooth()), lambda learn: learn.recorder.smooth_loss.seen), 'let a metric of yours look at')

class Quietly(Callback):
    "Another set is evaluated without a bar, which puts the bar's callback in anew"
    def before_fit(self): self.seen = []
    def after_epoch(self):
        with self.learn.no_bar(): self.seen.append(self.training)
def test_no_bar_within_a_fit():
    learn,cb = image_learner().to_xla(),Quietly()
    learn.fit(2, cbs=cb)
    assert len(cb.seen) == 2 and hasattr(learn, 'progress')

class Validates(Callback):
    "Within a step, with a learner of its own or by hand"
    def __init__(self): self.seen = []
    def after_step(self):
        if self.iter == 3: self.seen.append(self.look())
        self.model.train()
class ByLearner(Validates):
    def look(self):
        learn = Learner(self.dls, self.model, loss_func=nn.MSELoss(), cbs=[])
        with learn.no_bar(), learn.no_logging(): return float(learn.validate()[0])
class ByHand(Validates):
    def look(self):
        self.model.eval()
        with torch.no_grad(): return float(sum(F.mse_loss(self.model(x.to(self.x.device)), y.to(self.x.device)) for x,y in self.dls.train))

@pytest.mark.parametrize('cb', [ByLearner, ByHand])
def test_a_dataloader_is_read_within_a_step(cb):
    "It draws, and the thread that reads ahead would wait for whoever traces"
    def story():
        own = cb()
        return dict(cbs=own),lambda learn: own.seen
    agrees(story, 'a pass over a DataLoader')

class Halves(Callback):
    def after_pred(self): self.learn.pred = self.pred*.5
class Adds(Callback):
    def after_step(self):
        if self.train_iter == 3: self.learn.add_cb(Halves())
class Removes(Callback):
    def after_step(self):
        if self.train_iter == 3: self.learn.remove_cb(Halves)

@pytest.mark.parametrize('cbs', [[Adds], [Removes, Halves]], ids=['come', 'go'])
def test_callbacks_come_or_go_within_a_step(cbs):
    agrees(lambda: (dict(cbs=[cb() for cb in cbs]), lambda learn: [len(learn.cbs)]), None)

class Saves(Callback):
    def __init__(self, file): self.file,self.seen = file,[]
    def after_epoch(self):
        self.seen.append(float(self.file.exists()))
        self.file.unlink(missing_ok=True)
class SavesArray(Saves):
    def after_step(self): np.save(self.file, np.arange(3))
class SavesNumber(Saves):
    def after_step(self): torch.save(1, self.file)
class SavesList(Saves):
    def after_step(self): save_pickle(self.file, [1])

@pytest.mark.parametrize('cb', [SavesArray, SavesNumber, SavesList])
def test_a_step_writes_a_file(tmp_path, without_audits, cb):
    def story():
        own = cb(tmp_path/'left.npy')
        return dict(cbs=own),lambda learn: own.seen
    agrees(story, 'calls ')
