"A dataset that changes, draws or counts while a training reads its batches ahead"
import collections, random, threading, time
from contextlib import nullcontext
import pytest
from fastai.vision.all import *
from fastai.text.all import *
import fastai_xla.data as data
import fastai_xla.items as items_module
from fastai_xla.all import *
from fastai_xla.transfer import *
import on_both
from feeding import nothing_left

# a dataset that the training changes

class Scaled:
    "Items of which each is `scale`; they note who read them"
    def __init__(self, n=32): self.scale,self.n,self.by = 1.,n,[]
    def __len__(self): return self.n
    def __getitem__(self, i):
        self.by.append(threading.current_thread().name[:11])
        return torch.tensor(self.scale)

def passes(change, n=3):
    "What each batch of `n` passes holds, where `change(dataset, i)` is called after batch i"
    dl,res = DataLoader(Scaled(), bs=4, device=device(), num_workers=0),[]
    for _ in range(n):
        dl.dataset.scale = 1.
        res.append([])
        for i,b in enumerate(dl):
            res[-1].append(fetch(b)[0].item())
            change(dl.dataset, i)
            n = -1
            while n != len(dl.dataset.by):   # until the thread is done with what it may read ahead
                n = len(dl.dataset.by)
                time.sleep(.03)
    return res,Counter(dl.dataset.by)

def test_dataset_changed_between_batches_is_told_and_then_right():
    def change(d, i): d.scale += 1 if i == 3 else 0
    with pytest.warns(UserWarning, match='`scale`, which the items .* has been changed while batches were read ahead: up to 2') as told:
        found,by = passes(change)
    right = [1.]*4 + [2.]*4
    assert len([w for w in told if 'read ahead' in str(w.message)]) == 1
    late = [[1.]*n + [2.]*(8-n) for n in (4, 5, 6)]   # as far as the other thread has read by then
    assert found[0] in late and found[1:] == [right]*2   # plain fastai gives `right` in each pass
    assert by['fastai_xla '] == 5*4

def test_dataset_changed_between_passes_is_read_ahead():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        found,by = passes(lambda d, i: None)
    assert found == [[1.]*8]*3 and by['fastai_xla '] == 3*7*4

def test_dataset_that_counts_its_items_is_read_in_turn():
    class Counts(Scaled):
        def __getitem__(self, i):
            self.n_read = getattr(self, 'n_read', 0)+1
            return super().__getitem__(i)
    dl = DataLoader(Counts(), bs=4, device=device(), num_workers=0)
    assert [dl.dataset.n_read for _ in dl] == [4*(i+1) for i in range(8)]

def test_settings_are_found_without_a_look_at_the_items():
    "A `TfmdLists` is a list that runs its transforms"
    tls = TfmdLists(range(40), lambda i: torch.ones(2)*random.random())
    for workers in (0, 1):
        dl = tls.dataloaders(bs=8, num_workers=workers, device=device()).train
        random.seed(0)
        items_module.ItemSettings(dl, 2), data._holds_xla(dl.dataset)
        state = random.getstate()
        random.seed(0)
        assert random.getstate() == state

def tiny_images(path, n=20):
    for i in range(n): PILImage.create((np.random.rand(8+i%3, 8, 3)*255).astype('uint8')).save(path/f'{"ab"[i%2]}_{i}.png')
    return path

def test_validation_of_stock_images_is_read_ahead_without_a_warning(tmp_path):
    "A pass tells the transforms their `split_idx` as it starts, which is no change of the training's"
    block = DataBlock((ImageBlock, CategoryBlock), get_items=get_image_files, get_y=lambda f: f.name[0], splitter=IndexSplitter(range(12)),
                      item_tfms=Resize(8))
    dls = block.dataloaders(tiny_images(tmp_path), bs=2, num_workers=0, device=device())
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*read ahead')
        for _ in range(2): list(dls.valid)
    assert dls.valid not in items_module.changed_items

class Hits(Scaled):
    "Counts what it finds in its cache; the first batches are not there"
    def __init__(self):
        super().__init__()
        self.cache,self.hits = {9: 1., 20: 1.},0
    def __getitem__(self, i): return self.get(i)
    def get(self, i):
        if i in self.cache: self.hits += 1
        return super().__getitem__(i)

def test_a_vocabulary_that_is_asked_for_an_unknown_word_is_no_change():
    "fastai's `Numericalize` looks words up in a `defaultdict`, to which a look at what it has not adds a 0"
    texts = [['a', 'b', 'a', 'b'] for _ in range(20)] + [['a', str(i), 'b', 'a'] for i in range(20)]
    def dl(o2i):
        num = Numericalize(vocab=['xxunk', 'a', 'b'])
        num.o2i = o2i(num.o2i)
        return TfmdDL(TfmdLists(texts, num), bs=4, device=device(), num_workers=0)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*read ahead')
        stock = dl(lambda d: d)
        list(stock)
    assert stock not in items_module.changed_items and len(stock.dataset.tfms[0].o2i) > 20
    changed = dl(lambda d: collections.defaultdict(int, d))
    for i,_ in enumerate(changed):
        if i == 1: changed.dataset.tfms[0].o2i['a'] = 7
    assert changed in items_module.changed_items

def test_what_a_dataset_counts_itself_is_no_change_of_the_trainings():
    dl = DataLoader(Hits(), bs=4, device=device(), num_workers=0)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*read ahead')
        for _ in range(2): list(dl)
    assert dl.dataset.hits == 4 and dl in items_module.changed_items   # read in turn from now on

def test_nothing_is_read_while_a_step_is_traced(monkeypatch):
    "A trace shows other numbers, and holds all objects there are for a moment: a thread beside it has died of that"
    from fastai_xla.capture.step import Trace
    init,tracing,seen = Trace.__init__,[],[]
    def traced(self, *args, **kwargs):
        tracing.append(1)
        time.sleep(.05)
        try: init(self, *args, **kwargs)
        finally: tracing.pop()
    class Items:
        def __len__(self): return 32
        def __getitem__(self, i):
            seen.append(bool(tracing))
            return torch.ones(4), torch.tensor(i%2)
    monkeypatch.setattr(Trace, '__init__', traced)
    dls = DataLoaders(*(DataLoader(Items(), bs=4, num_workers=0) for _ in range(2)))
    learn = Learner(dls, nn.Linear(4, 2), loss_func=CrossEntropyLossFlat()).to_xla()
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    assert len(seen) > 64 and not any(seen)

class Changing:
    "What a training may change between two batches"
    def __init__(self, n, by):
        self.x,self.y = torch.randn(n, 6, generator=torch.Generator().manual_seed(n)),np.zeros(n)
        self.kept,self.by = collections.deque(maxlen=9),by
    def __len__(self): return len(self.x)
    def __getitem__(self, i):
        more = self.kept[-1-i%len(self.kept)] if self.kept else 0
        return self.x[i]*self.by['scale'],torch.tensor([float(self.y[i]) + more])

class Corrects(Callback):
    "Targets of the next batch become what the model makes of them"
    def after_batch(self):
        ds,i = self.dls.train.dataset,(self.iter+1)*8
        if self.training: ds.y[i:i+8] = self.model(ds.x[i:i+8].to(self.x.device)).detach().cpu().numpy()[:,0]

class Feeds(Callback):
    "A buffer of what was seen"
    def after_batch(self): self.dls.train.dataset.kept.append(self.train_iter/10)

class Schedules(Callback):
    "Items are more difficult from batch to batch"
    def __init__(self, by): self.by = by
    def after_step(self): self.by['scale'] += .1

@pytest.mark.parametrize('make,replays', [(lambda by: Corrects(), ['auto', False]), (lambda by: Feeds(), ['auto']), (Schedules, ['auto'])],
                         ids=['targets', 'buffer', 'schedule'])
def test_items_that_a_callback_changes_from_batch_to_batch(make, replays):
    "What is read ahead does not depend on whether steps are replayed"
    def fit(replay):
        torch.manual_seed(0)
        by = dict(scale=1.)
        dls = DataLoaders(DataLoader(Changing(64, by), bs=8), DataLoader(Changing(16, by), bs=8))
        learn = Learner(dls, nn.Linear(6, 1), loss_func=nn.MSELoss(), opt_func=SGD, cbs=make(by))
        if replay is not None: learn.to_xla(replay=replay)
        with learn.no_bar(), learn.no_logging(): learn.fit(3, .1)
        return [*map(float, learn.recorder.losses), *learn.model.weight.detach().cpu()[0].tolist()]
    cpu = fit(None)
    for replay in replays: test_close(fit(replay), cpu, eps=1e-4)

class DrawsInSome:
    "Draws only in later batches of a pass"
    def __len__(self): return 32
    def __getitem__(self, i):
        noise = torch.randn(2) if i%12 == 11 else 0
        return torch.full((2,), i/32.)+noise,torch.rand(1) if i == 30 else torch.ones(1)

class DrawsInSteps(Callback):
    def __init__(self): self.drawn = []
    def after_batch(self): self.drawn.append(float(torch.rand(())))

def test_dataset_that_draws_only_in_some_batches():
    def trained(xla):
        dls = DataLoaders(*(TfmdDL(DrawsInSome(), bs=4, num_workers=0) for _ in range(2)))
        torch.manual_seed(1)
        cb = DrawsInSteps()
        learn = Learner(dls, nn.Linear(2, 1), loss_func=nn.MSELoss(), opt_func=SGD, cbs=cb)
        if xla: learn.to_xla()
        with learn.no_bar(), learn.no_logging(): learn.fit(2, .1)
        return cb.drawn,fetch(learn.model.state_dict()),learn.recorder.losses
    right = trained(False)
    drawn,weights,losses = trained(True)
    assert drawn == right[0]
    for a,b in zip(weights.values(), right[1].values()): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    test_close(losses, right[2], 1e-5)

class OfTheModel:
    "Items that the model in training makes, as those of an agent that acts; where they stay, nothing is computed as they are made"
    def __init__(self, net, stay):
        self.net,self.stay,self.x = net,stay,torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    def __len__(self): return len(self.x)
    def __getitem__(self, i):
        x = self.x[i].to(next(self.net.parameters()).device)
        with torch.no_grad(): x = x*(1+self.net(x[None]).softmax(1).max())
        return x if self.stay else x.cpu(),torch.tensor(i%4)

@pytest.mark.parametrize('kwargs', [{}, dict(steps_per_execution=3)], ids=['one', 'several'])
@pytest.mark.parametrize('stay', [False, True])
def test_items_of_the_model_are_made_after_each_step(stay, kwargs):
    def make():
        model = on_both.mlp()
        items = OfTheModel(model, stay)
        return Learner(DataLoaders(*(DataLoader(items, bs=8) for _ in range(2))), model, loss_func=F.cross_entropy)
    def story(learn): learn.fit(2, .1)
    _,there = on_both.told(make, story)
    told = pytest.warns(UserWarning, match='computed on the device') if kwargs else nullcontext()
    with told: _,here = on_both.told(make, story, True, **kwargs)
    other = [k for k in there if not on_both.agree(there[k], here[k], 1e-4)]
    assert not other, [(k, there[k], here[k]) for k in other[:4]]

def test_items_that_another_net_computes_on_the_device_are_made_in_turn():
    "It may be one that a callback changes where nobody looks"
    net = on_both.mlp().to(device())
    items = OfTheModel(net, False)
    learn = Learner(DataLoaders(*(DataLoader(items, bs=8) for _ in range(2))), on_both.mlp(), loss_func=F.cross_entropy)
    learn.to_xla(steps_per_execution=3)
    with learn.no_bar(), learn.no_logging(), pytest.warns(UserWarning, match='computed on the device'): learn.fit(1)
    assert learn.dls.train in items_module.computing
