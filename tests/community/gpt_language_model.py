"A GPT of Hugging Face in a Learner: a transform for the tokens, LMDataLoader, a callback that takes the logits, then generation"
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

class TransformersTokenizer(Transform):
    "From a text to ids, and back"
    def __init__(self, words): self.words,self.ids = words,{w: i for i,w in enumerate(words)}
    def encodes(self, x): return tensor([self.ids[w] for w in x.split()])
    def decodes(self, x): return TitledStr(' '.join(self.words[i] for i in x.tolist()))

class DropOutput(Callback):
    def after_pred(self): self.learn.pred = self.pred[0]

def run(xla, seed, small=False):
    set_seed(seed)
    texts = stories(400 if small else 1200, seed)
    words = sorted({w for t in texts for w in t.split()})
    tfm,n = TransformersTokenizer(words),len(texts)
    tls = TfmdLists(texts, tfm, splits=[range(n*4//5), range(n*4//5, n)], dl_type=LMDataLoader)
    dls = tls.dataloaders(bs=8, seq_len=26, num_workers=0)
    config = GPT2Config(vocab_size=len(words), n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.,
        bos_token_id=0, eos_token_id=0)
    learn = Learner(dls, GPT2LMHeadModel(config), loss_func=CrossEntropyLossFlat(), cbs=[DropOutput], metrics=[accuracy, Perplexity()])
    if xla: learn.to_xla()
    learn.validate()
    learn.fit_one_cycle(3 if small else 3, 1e-2)
    prompt = tfm('ben is a smith . each day')[None].to(learn.dls.device)
    said = learn.model.generate(prompt, max_length=12, num_beams=1, do_sample=False, pad_token_id=0)
    text = tfm.decode(said[0].cpu())
    return dict(metric=float(learn.recorder.values[-1][2]), text=str(text), losses=[float(l) for l in learn.recorder.losses], learn=learn)
