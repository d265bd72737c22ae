"Small language models and classifiers of texts"
from pydoc_data.topics import topics
from fastai.text.all import *
from fastai_xla.all import *
from fastai_xla.lowerings.core import register_lowerings
import fastai_xla.lowerings.norm, fastai_xla.lowerings.rnn, fastai_xla.compat.text

device()
register_lowerings()
texts = [topics[k] for k in sorted(topics)]
plain = dict(hidden_p=0., input_p=0., embed_p=0., weight_p=1e-9, output_p=0.)   # no dropout; fastai's own WeightDropout fails at 0
small = dict(emb_sz=20, n_hid=30)
one_layer = plain | dict(n_layers=1)   # where it is not the model that is tested

def lm_dls(n=10, bs=8, seq_len=24, valid_pct=.3):
    return TextDataLoaders.from_df(pd.DataFrame(dict(text=texts[:n])), is_lm=True, text_col='text',
                                   valid_pct=valid_pct, seed=0, tok_tfm=BaseTokenizer(), bs=bs, seq_len=seq_len)

def lm_learner(path='.', dls=None, config=plain, **kwargs):
    set_seed(0)
    learn = language_model_learner(dls or lm_dls(), AWD_LSTM, config=awd_lstm_lm_config | small | config,
                                   pretrained=False, metrics=[accuracy, Perplexity()], path=path, **kwargs)
    return learn.remove_cb(ProgressCallback)

def clas_dls(n=160, bs=8, seq_len=24, spread=8, shortest=20):
    words = ' '.join(texts).split()
    lens = [int(shortest*spread**(i*37%n/n)) for i in range(n)]
    df = pd.DataFrame(dict(text=[' '.join(words[i*200:i*200+k]) for i,k in enumerate(lens)], label=[i%2 for i in range(n)]))
    return TextDataLoaders.from_df(df, valid_pct=.25, seed=0, text_col='text', label_col='label',
                                   tok_tfm=BaseTokenizer(), bs=bs, seq_len=seq_len, min_freq=1)

def clas_learner(path='.', dls=None, config=plain, **kwargs):
    set_seed(0)
    learn = text_classifier_learner(dls or clas_dls(), AWD_LSTM, seq_len=24, config=small | dict(n_layers=2) | config,
                                    pretrained=False, metrics=accuracy, path=path, **kwargs)
    return learn.remove_cb(ProgressCallback)

def fit(learn, *args, **kwargs):
    set_seed(1)
    with learn.no_logging(): learn.fit_one_cycle(*args, **kwargs)
    return learn
