"A tabular competition: folds, embeddings, the organisers' own metric, averaged predictions of a test set, and which columns matter"
from sklearn.datasets import make_classification
from sklearn.model_selection import KFold
from sklearn.metrics import roc_auc_score
from fastai.tabular.all import *
from fastai_xla.all import *

def download(n, seed):
    X,y = make_classification(n, 8, n_informative=5, n_redundant=1, class_sep=1., random_state=seed)
    rng = np.random.RandomState(seed)
    df = pd.DataFrame(X.astype(np.float32), columns=[f'num{i}' for i in range(8)])
    df['city'] = pd.cut(df.pop('num0'), 12, labels=[f'city {i}' for i in range(12)]).astype(str)
    df['plan'] = np.where(df.pop('num1') > 0, 'gold', 'basic')
    df.loc[rng.rand(n) < .1, 'num2'] = np.nan
    df['signed'] = pd.Timestamp('2020-01-01') + pd.to_timedelta(rng.randint(0, 700, n), unit='D')
    df['churn'] = np.where(y == 1, 'yes', 'no')
    return df

def capture_rate(y, p, top=.2):
    "The organisers': how many of the positives are among the highest scores"
    order = np.argsort(-p)
    return y[order][:int(len(y)*top)].sum()/y.sum()

def mixed_score(preds, targs):
    y,p = targs.numpy(),preds[:,1].numpy()
    return .5*(2*roc_auc_score(y, p)-1) + .5*capture_rate(y, p)

class Gini(Metric):
    "The same by hand, as a Metric that collects on the CPU"
    def reset(self): self.preds,self.targs = [],[]
    def accumulate(self, learn):
        self.preds.append(to_detach(learn.pred.softmax(-1)[:,1]))
        self.targs.append(to_detach(learn.y))
    @property
    def value(self):
        if not self.preds: return
        return 2*roc_auc_score(torch.cat(self.targs).numpy().ravel(), torch.cat(self.preds).numpy())-1

def importance(learn, df):
    "What a shuffled column costs"
    res,dl = {},learn.dls.test_dl(df, with_labels=True, bs=256)
    base = learn.validate(dl=dl)[1]
    for col in ['num4', 'city']:
        was = dl.items[col].values.copy()
        dl.items[col] = np.random.permutation(was)
        res[col] = base-learn.validate(dl=dl)[1]
        dl.items[col] = was
    return res

def run(xla, seed, small=False):
    set_seed(seed)
    n,folds,epochs = (1500, 2, 3) if small else (6000, 3, 4)
    df = add_datepart(download(n, seed), 'signed', time=False)
    train,test = df.iloc[:-n//5].reset_index(drop=True),df.iloc[-n//5:].reset_index(drop=True)
    cont,cat = cont_cat_split(train, max_card=20, dep_var='churn')
    oof,test_preds,losses = torch.zeros(len(train), 2),[],[]
    for tr,va in KFold(folds, shuffle=True, random_state=seed).split(train):
        procs = [Categorify, FillMissing, Normalize]
        to = TabularPandas(train, procs, cat, cont, y_names='churn', y_block=CategoryBlock(), splits=(list(tr), list(va)))
        dls = to.dataloaders(bs=64, val_bs=256)
        metrics = [accuracy, AccumMetric(mixed_score, activation='softmax', flatten=False, name='mixed'), Gini(), RocAucBinary()]
        config = tabular_config(ps=[0., 0.], embed_p=0.)
        learn = tabular_learner(dls, layers=[64, 32], emb_szs={'city': 6}, config=config, metrics=metrics, wd=.1)
        if xla: learn.to_xla()
        learn.fit_one_cycle(epochs, 5e-3)
        losses.append(learn.recorder.losses)
        mixed = learn.recorder.values[-1][3]
        preds,targs = learn.get_preds()
        oof[va] = preds
        test_preds.append(learn.get_preds(dl=learn.dls.test_dl(test.drop(columns='churn')))[0])
    drops = importance(learn, test)
    row,klass,probs = learn.predict(test.iloc[0])
    blend = torch.stack(test_preds).mean(0)[:,1].numpy()
    auc,oof_auc = roc_auc_score(test['churn'] == 'yes', blend),roc_auc_score(train['churn'] == 'yes', oof[:,1].numpy())
    scores = dict(metric=auc, oof=oof_auc, mixed=float(mixed), importance=list(drops.values()), first=float(probs[1]))
    return scores | dict(losses=losses, learn=learn)
