"A Kaggle image baseline: files, a timm model, folds, the best epoch of each, test-time augmentation, a submission"
import gc, tempfile
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from fastai.vision.all import *
from fastai_xla.all import *

def download(path, n, seed):
    "What a competition gives: train.csv, sample_submission.csv, and folders of files"
    digits = load_digits()
    idxs = np.random.RandomState(seed).permutation(len(digits.images))[:n]
    n_test = n//5
    for part,ids in dict(test_images=idxs[:n_test], train_images=idxs[n_test:]).items():
        (path/part).mkdir()
        for i in ids: Image.fromarray((digits.images[i]*15.9).astype(np.uint8)).resize((16, 16)).convert('RGB').save(path/part/f'{i}.png')
    df = pd.DataFrame(dict(image_id=[f'{i}.png' for i in idxs], label=[f'digit {digits.target[i]}' for i in idxs]))
    df[n_test:].to_csv(path/'train.csv', index=False)
    df[:n_test].assign(label='digit 0').to_csv(path/'sample_submission.csv', index=False)
    return list(df[:n_test]['label'])

def get_dls(path, df, fold, bs):
    df = df.copy()
    df['is_valid'] = df['fold'] == fold
    augs = aug_transforms(size=16, do_flip=False, max_rotate=10., max_warp=0., max_lighting=.1)
    block = DataBlock(blocks=(ImageBlock, CategoryBlock), splitter=ColSplitter('is_valid'),
        get_x=ColReader('image_id', pref=path/'train_images'), get_y=ColReader('label'),
        item_tfms=Resize(20), batch_tfms=[*augs, Normalize.from_stats(*imagenet_stats)])
    return block.dataloaders(df, bs=bs, path=path, num_workers=0)

def run(xla, seed, small=False):
    set_seed(seed)
    n,folds,epochs = (360, 2, 2) if small else (1500, 3, 8)
    narrow = dict(stem_width=8, channels=(16, 32, 32, 64)) if small else {}
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp)
        answers = download(path, n, seed)
        df,sub = pd.read_csv(path/'train.csv'),pd.read_csv(path/'sample_submission.csv')
        kfold = StratifiedKFold(folds, shuffle=True, random_state=seed)
        for fold,(_,valid) in enumerate(kfold.split(df, df['label'])): df.loc[valid, 'fold'] = fold
        scores,preds,losses = [],[],[]
        for fold in range(folds):
            dls = get_dls(path, df, fold, 16 if small else 32)
            loss = LabelSmoothingCrossEntropyFlat(eps=.05)
            metrics = [accuracy, F1Score(average='macro')]
            learn = vision_learner(dls, 'test_resnet', pretrained=False, ps=.1, loss_func=loss, metrics=metrics, wd=.01, **narrow)
            if xla: learn.to_xla()
            best = SaveModelCallback(monitor='accuracy', fname=f'fold{fold}', with_opt=True)
            cbs = [best, EarlyStoppingCallback(monitor='accuracy', patience=5)]
            learn.unfreeze()
            learn.fit_one_cycle(epochs, 5e-3, cbs=cbs)
            losses.append(learn.recorder.losses)
            valid_preds,valid_y = learn.get_preds(ds_idx=1)
            scores.append(float(accuracy(valid_preds, valid_y)))
            test_dl = learn.dls.test_dl([path/'test_images'/o for o in sub['image_id']])
            preds.append(learn.tta(dl=test_dl, n=2, beta=.5)[0])
            learn.export(path/f'fold{fold}.pkl')
            vocab = learn.dls.vocab
            if fold < folds-1: del learn
            gc.collect()
        label,_,_ = load_learner(path/'fold0.pkl').predict(path/'test_images'/sub['image_id'][0])
        probs = torch.stack(preds).mean(0)
        sub['label'] = [vocab[i] for i in probs.argmax(1)]
        sub.to_csv(path/'submission.csv', index=False)
        right = pd.read_csv(path/'submission.csv')['label'] == answers
        assert label in vocab
    return dict(metric=float(right.mean()), folds=scores, losses=losses, learn=learn)
