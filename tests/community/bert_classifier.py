"A transformer of Hugging Face in a Learner, with batches of dicts, a wrapper and a callback that takes the output apart"
import inspect
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup
from fastai.text.all import *
from fastai_xla.all import *

names,places = 'anna ben carla david eva felix'.split(),'paris london rome berlin oslo madrid'.split()
vocab = ['[PAD]', '[CLS]', '[SEP]', 'went', 'from', 'to', 'then', 'and', 'stayed', 'left', *names, *places]

def sentences(n, seed):
    "Does the journey end in the first three places? The end is at another position in each"
    rng = random.Random(seed)
    trips = [[rng.choice(places) for _ in range(rng.randint(2, 4))] for _ in range(n)]
    return [(f"{rng.choice(names)} went from {' then to '.join(ps)}", int(ps[-1] in places[:3])) for ps in trips]

class Tokenizer:
    "A word level one, with the interface that people use"
    def __call__(self, texts, max_length):
        ids = [[1] + [vocab.index(w) for w in t.split()][:max_length-2] + [2] for t in texts]
        def pad(o): return o + [0]*(max_length-len(o))
        return dict(input_ids=[pad(o) for o in ids], attention_mask=[pad([1]*len(o)) for o in ids])

class SentenceDataset:
    def __init__(self, rows, tok): self.enc,self.labels = tok([t for t,_ in rows], 14),[l for _,l in rows]
    def __len__(self): return len(self.labels)
    def __getitem__(self, i):
        x = {k: torch.tensor(v[i]) for k,v in self.enc.items()}
        return x | dict(overflow=torch.tensor(0)),torch.tensor(self.labels[i])

class HFWrapper(Module):
    "Gives the model what its forward takes, and nothing else"
    def __init__(self, hf_model):
        self.hf_model = hf_model
        self.args = list(inspect.signature(hf_model.forward).parameters)
    def forward(self, x): return self.hf_model(**{k: v for k,v in x.items() if k in self.args}, output_hidden_states=True, return_dict=True)

class HFCallback(Callback):
    "Keep the logits as the prediction, the rest on the learner"
    def after_pred(self):
        self.learn.hf_outputs = {k: v for k,v in self.pred.items() if k != 'logits'}
        self.learn.pred = self.pred.logits

def hf_splitter(m):
    bert = m.hf_model.bert
    return L(bert.embeddings, *bert.encoder.layer, nn.ModuleList([bert.pooler, m.hf_model.classifier])).map(params)

def run(xla, seed, small=False):
    set_seed(seed)
    n,epochs,layers = (800, 3, 1) if small else (2000, 6, 2)
    rows,tok = sentences(n, seed),Tokenizer()
    train,valid = SentenceDataset(rows[:-n//5], tok),SentenceDataset(rows[-n//5:], tok)
    dls = DataLoaders.from_dsets(train, valid, bs=32, shuffle=True, num_workers=0)
    config = BertConfig(vocab_size=len(vocab), hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0., attention_probs_dropout_prob=0., num_labels=2, initializer_range=.1)
    model = BertForSequenceClassification(config)
    adamw = partial(Adam, decouple_wd=True)
    learn = Learner(dls, HFWrapper(model), loss_func=CrossEntropyLossFlat(), opt_func=adamw, metrics=[accuracy, F1Score()], cbs=HFCallback,
        splitter=hf_splitter)
    if xla: learn.to_xla()
    learn.freeze_to(-2)
    learn.fit_one_cycle(1, 5e-3)
    losses = [learn.recorder.losses]
    learn.unfreeze()
    learn.fit_one_cycle(epochs, slice(2e-3, 5e-3))
    losses.append(learn.recorder.losses)
    preds,targs = learn.get_preds()
    hidden = [float(o[:,0].std(0).mean().cpu()) for o in learn.hf_outputs['hidden_states']]
    return dict(metric=float(accuracy(preds, targs)), hidden=hidden, losses=losses, learn=learn)
