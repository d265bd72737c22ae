"Small data sets, made from a seed, with the structure of those that fastai's notebooks would download"
import runpy
from functools import lru_cache
from pathlib import Path
import numpy as np

_makers = {}

def stands_for(*names):
    "Register a function that writes a data set into a folder, under names in `URLs`"
    def register(f):
        _makers.update({n: f for n in names})
        return f
    return register

def makers(recipes=''):
    "All makers: those here, and those of `standins*.py` beside this file or in the folder of the recipes"
    for folder in (Path(__file__).parent, *([Path(recipes)] if recipes else [])):
        for f in sorted(folder.glob('standins_*.py')): _makers.update(runpy.run_path(str(f)).get('makers', {}))
    return _makers

def rng(name): return np.random.default_rng(sum(map(ord, name)))

def save_image(path, array):
    "Write an array of bytes as an image, making the folder"
    from PIL import Image
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array.astype(np.uint8)).save(path)

@lru_cache
def _digits():
    from sklearn.datasets import load_digits
    d = load_digits()
    return d.images,d.target

def digit(label, i, size=28):
    "The `i`-th image of a digit, enlarged"
    images,labels = _digits()
    found = images[labels == label]
    k = size//8+1
    return np.kron(found[i % len(found)]*15.9, np.ones((k, k)))[:size,:size]

def _digit_folders(path, folders, labels, n):
    for k,folder in enumerate(folders):
        for label in labels:
            for i in range(n): save_image(path/folder/str(label)/f'{label}{i:03d}{k}.png', digit(label, i+k*n))

def labels_csv(path, columns, rows):
    path.write_text('\n'.join([','.join(columns), *(','.join(map(str, r)) for r in rows)])+'\n')

@stands_for('MNIST_TINY')
def mnist_tiny(path):
    _digit_folders(path, ('train', 'valid'), (3, 7), 40)
    for i in range(10): save_image(path/'test'/f'{i}.png', digit(3, i))
    files = [(f.relative_to(path),f.parent.name) for f in sorted(path.glob('*/[37]/*.png'))]
    labels_csv(path/'labels.csv', ('name', 'label'), files)

@stands_for('MNIST_SAMPLE')
def mnist_sample(path):
    _digit_folders(path, ('train', 'valid'), (3, 7), 64)
    files = [(f.relative_to(path),int(f.parent.name == '7')) for f in sorted(path.glob('*/[37]/*.png'))]
    labels_csv(path/'labels.csv', ('name', 'label'), files)

@stands_for('MNIST')
def mnist(path): _digit_folders(path, ('training', 'testing'), range(10), 20)

def picture(r, label, size=64):
    "Noise with a stripe whose place and colour tell the label"
    a = r.integers(0, 120, (size, size, 3))
    at = (label*7) % (size-8)
    a[at:at+8] = [(label*53) % 256, (label*101) % 256, (label*29) % 256]
    return a

breeds = 'Abyssinian Bengal Birman Bombay beagle boxer pug samoyed'.split()

@stands_for('PETS')
def pets(path):
    r = rng('pets')
    for k,b in enumerate(breeds):
        for i in range(1, 15): save_image(path/'images'/f'{b}_{i}.jpg', picture(r, k))

@stands_for('LSUN_BEDROOMS')
def bedrooms(path):
    r = rng('bedrooms')
    for i in range(96): save_image(path/'0'/f'{i%7}'/f'{i:04d}.jpg', picture(r, i % 5))

codes = 'Animal Archway Bicyclist Bridge Building Car CartLuggagePram Child Column_Pole Fence Sky Void'.split()

@stands_for('CAMVID_TINY', 'CAMVID')
def camvid(path):
    r = rng('camvid')
    (path/'codes.txt').write_text('\n'.join(codes)+'\n')
    for i in range(40):
        mask = np.kron(r.integers(0, len(codes), (3, 4)), np.ones((32, 32)))
        save_image(path/'images'/f'f_{i:02d}.png', np.stack([mask*20, 255-mask*20, mask*7], -1) + r.integers(0, 9, (96, 128, 3)))
        save_image(path/'labels'/f'f_{i:02d}_P.png', mask)

words = """the a film movie was is and of to in it i this that not with very really good bad great awful boring fun
plot story actor actress scene music end start never always loved hated watch again time people life house night
dog cat old new small big""".split()
good,bad = 'good great fun loved'.split(),'bad awful boring hated'.split()

def review(r, positive, n=None):
    "A sentence of common words, with some that tell whether it is positive"
    ws = list(r.choice(words, n or r.integers(20, 60))) + list(r.choice(good if positive else bad, 4))
    return ' '.join(r.permutation(ws)).capitalize() + '.'

@stands_for('IMDB_SAMPLE')
def imdb_sample(path):
    r = rng('imdb_sample')
    rows = [(('negative','positive')[i%2], review(r, i%2), i >= 96) for i in range(120)]
    labels_csv(path/'texts.csv', ('label', 'text', 'is_valid'), rows)

@stands_for('IMDB')
def imdb(path):
    r = rng('imdb')
    for split in ('train', 'test'):
        for k,label in enumerate(('neg', 'pos')):
            for i in range(32):
                f = path/split/label/f'{i}_{k*9}.txt'
                f.parent.mkdir(parents=True, exist_ok=True)
                f.write_text(review(r, k))
    (path/'unsup').mkdir()
    for i in range(32): (path/'unsup'/f'{i}_0.txt').write_text(review(r, i%2))

@stands_for('WIKITEXT_TINY', 'WIKITEXT')
def wikitext(path):
    r = rng('wikitext')
    for name,n in (('train', 60), ('test', 12)):
        (path/f'{name}.csv').write_text('\n'.join(f'"{review(r, i%2, 80)}"' for i in range(n))+'\n')

@stands_for('ADULT_SAMPLE')
def adult(path):
    r = rng('adult')
    cats = {'workclass': ('Private', 'Self-emp-inc', 'Local-gov', '?'), 'education': ('HS-grad', 'Bachelors', 'Masters', 'Some-college'),
        'marital-status': ('Married-civ-spouse', 'Divorced', 'Never-married'), 'occupation': ('Sales', 'Craft-repair', 'Tech-support', ''),
        'relationship': ('Husband', 'Wife', 'Own-child', 'Unmarried'), 'race': ('White', 'Black', 'Other'), 'sex': ('Male', 'Female'),
        'native-country': ('United-States', 'Mexico', '?')}
    order = ('age,workclass,fnlwgt,education,education-num,marital-status,occupation,relationship,race,sex,'
             'capital-gain,capital-loss,hours-per-week,native-country,salary').split(',')
    rows = []
    for i in range(1200):
        row = {k: ' '+v if v else v for k,v in ((k, r.choice(v)) for k,v in cats.items())}
        age = r.integers(18, 80)
        row |= dict(zip(('age', 'fnlwgt', 'capital-gain', 'capital-loss', 'hours-per-week'),
                        (age, r.integers(20000, 400000), r.choice([0, 5000]), 0, r.integers(10, 70))))
        row['education-num'] = '' if i % 17 == 0 else float(r.integers(5, 16))
        row['salary'] = '>=50k' if age > 45 else '<50k'
        rows.append([row[k] for k in order])
    labels_csv(path/'adult.csv', order, rows)

def _ratings(r, n, users, movies):
    return [(r.integers(1, users+1), r.integers(1, movies+1), r.integers(1, 6), 880000000+i) for i in range(n)]

@stands_for('ML_SAMPLE')
def ml_sample(path):
    labels_csv(path/'ratings.csv', ('userId', 'movieId', 'rating', 'timestamp'), _ratings(rng('ml_sample'), 1200, 40, 50))

@stands_for('ML_100k')
def ml_100k(path):
    r = rng('ml_100k')
    for name,n in (('u.data', 2000), ('u1.base', 1600), ('u1.test', 400)):
        (path/name).write_text('\n'.join('\t'.join(map(str, o)) for o in _ratings(r, n, 60, 80))+'\n')
    (path/'u.item').write_bytes('\n'.join(f'{i}|Movie {i} (1995)|01-Jan-1995||http://none|'+'|'.join('0'*19)
                                          for i in range(1, 81)).encode('latin-1'))

numerals = 'one two three four five six seven eight nine'.split()

@stands_for('HUMAN_NUMBERS')
def human_numbers(path):
    tens = 'twenty thirty forty fifty sixty seventy eighty ninety'.split()
    spoken = [f'{t} {n}'.strip() for t in ('', *tens) for n in numerals]
    many = [f'{h} hundred {s}' for h in numerals for s in spoken]
    (path/'train.txt').write_text(' \n'.join((spoken+many)[:600])+' \n')
    (path/'valid.txt').write_text(' \n'.join((spoken+many)[600:])+' \n')

@stands_for('WT103_FWD', 'WT103_BWD')
def wt103(path):
    import pickle, torch
    from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
    from fastai.text.models.core import get_language_model
    from .prepare import seeded_weights
    vocab = ['xxunk', 'xxpad', 'xxbos', 'xxeos', 'xxfld', 'xxrep', 'xxwrep', 'xxup', 'xxmaj', *words]
    model = get_language_model(AWD_LSTM, len(vocab), config=awd_lstm_lm_config)
    way = path.name[-3:]
    torch.save(seeded_weights(model), path/f'lstm_{way}.pth')
    with open(path/f'itos_{way}.pkl', 'wb') as f: pickle.dump(vocab, f)
