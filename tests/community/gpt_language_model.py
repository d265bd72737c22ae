"A GPT of Hugging Face in a Learner: words by number in a transform, LMDataLoader, a callback that takes the logits, then generation"
from transformers import GPT2Config, GPT2LMHeadModel
from fastai.text.all import *
from fastai_xla.all import *

def stories(n, seed):
    rng = random.Random(seed)
    people,acts = 'anna ben carla david'.split(),dict(baker='bread', smith='iron', tailor='coats', farmer='corn')
    def one():
        a,(job,ware) = rng.choice(people),rng.choice(list(acts.items()))
        return f'{a} is a {job} . each day {a} sells {ware} . <end>'
    return [one() for _ in range(n)]

class WordNumbers(Transform):
    "Each word by its place in a sorted list, and back"
    def __init__(self, texts): self.words = sorted(set(' '.join(texts).split()))
    def encodes(self, text:str): return TensorText([self.words.index(w) for w in text.split()])
    def decodes(self, o:TensorText): return ' '.join(self.words[i] for i in o.tolist())

class LogitsAlone(Callback):
    "Of an output with names, what the loss wants"
    def after_pred(self): self.learn.pred = self.pred.logits

def run(xla, seed, small=False):
    set_seed(seed)
    n,layers = (400, 1) if small else (1200, 2)
    texts = stories(n, seed)
    numbers = WordNumbers(texts)
    lists = TfmdLists(texts, numbers, splits=RandomSplitter(.2, seed=seed)(texts), dl_type=LMDataLoader)
    dls = lists.dataloaders(bs=8, seq_len=26, num_workers=0)
    config = GPT2Config(vocab_size=len(numbers.words), n_positions=64, n_embd=32, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.)
    learn = Learner(dls, GPT2LMHeadModel(config), loss_func=CrossEntropyLossFlat(), cbs=LogitsAlone, metrics=[accuracy, Perplexity()])
    if xla: learn.to_xla()
    untrained = learn.validate()[2]
    learn.fit_one_cycle(3, 1e-2)
    *_,right,perplexity = learn.recorder.values[-1]
    start = numbers('ben is a smith . each day')[None].to(learn.dls.device)
    said = learn.model.generate(start, max_length=12, do_sample=False, pad_token_id=0)
    story = numbers.decode(TensorText(said[0].cpu()))
    return dict(metric=right, untrained=untrained, perplexity=perplexity, story=story, losses=[learn.recorder.losses], learn=learn)
