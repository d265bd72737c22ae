"Stand-ins for data sets that chapters of the fast.ai book download and that are not in `tests.foreign.standins`, or are larger there"

import numpy as np
import pandas as pd
from PIL import Image

makers = {}

def maker(*names):
    def keep(f):
        makers.update({n: f for n in names})
        return f
    return keep

# Pictures
def picture(rng, kind, size, noise=40):
    "Stripes whose direction, width and color say which kind it is"
    w,h = size
    y,x = np.mgrid[:h,:w]
    angle,width = kind*np.pi/7,2 + kind%3
    stripes = np.sin((x*np.cos(angle) + y*np.sin(angle))*2/width)
    color = np.array([60+(kind*67)%150, 60+(kind*31)%150, 60+(kind*101)%150])
    im = color + 50*stripes[...,None] + rng.normal(0, noise, (h, w, 3))
    return Image.fromarray(im.clip(0, 255).astype(np.uint8))

def save(im, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    im.save(path)

@maker('IMAGENETTE', 'IMAGENETTE_160', 'IMAGENETTE_320')
def imagenette(path, n=12, n_valid=5):
    rng = np.random.default_rng(2)
    for kind,name in enumerate(('n01440764', 'n03028079', 'n03425413', 'n03888257')):
        for i in range(n+n_valid): save(picture(rng, kind, (48, 44)), path/('train' if i < n else 'val')/name/f'{name}_{i}.JPEG')

@maker('CAMVID_TINY')
def camvid(path, n=20):
    "A box and a circle on a ground, and which is where"
    rng = np.random.default_rng(3)
    y,x = np.mgrid[:32,:40]
    for i in range(n):
        mask = np.zeros((32, 40), np.uint8)
        a,b = rng.integers(8, 24, 2)
        mask[:a,:b] = 1
        mask[(y-a)**2 + (x-b)**2 < 36] = 2
        im = np.array([[40, 90, 60], [200, 60, 60], [60, 60, 200]])[mask] + rng.normal(0, 20, (32, 40, 3))
        save(Image.fromarray(im.clip(0, 255).astype(np.uint8)), path/'images'/f'seq_{i:03}.png')
        save(Image.fromarray(mask), path/'labels'/f'seq_{i:03}_P.png')
    (path/'codes.txt').write_text('ground\nbox\ncircle\n')

@maker('PASCAL_2007')
def pascal(path, n=60):
    "Each thing in a picture adds its color; a picture holds one to three things"
    rng,things = np.random.default_rng(4),np.array(['boat', 'car', 'cat', 'chair', 'person'])
    rows = []
    for i in range(n):
        held = rng.permutation(5)[:rng.integers(1, 4)]
        im = np.mean([np.asarray(picture(rng, k, (44, 40))) for k in held], 0)
        save(Image.fromarray(im.astype(np.uint8)), path/'train'/f'{i:06}.jpg')
        rows.append(dict(fname=f'{i:06}.jpg', labels=' '.join(things[held]), is_valid=i%5 == 0))
    pd.DataFrame(rows).to_csv(path/'train.csv', index=False)

calibration = '40 0 32\n0 40 24\n0 0 1\n' + '0 0 0 0\n1 0 0\n0 1 0\n0 0 1\n0 0 0\n64 48\n'

@maker('BIWI_HEAD_POSE')
def biwi(path, people=('01', '02', '13'), n=16):
    "A bright spot at the head's center, which the pose file gives in space: three lines of a rotation, then the place"
    rng = np.random.default_rng(5)
    y,x = np.mgrid[:48,:64]
    for person in people:
        for i in range(n):
            z = rng.uniform(900, 1100)
            place = np.array([rng.uniform(-.5, .5)*z, rng.uniform(-.35, .35)*z, z])
            cx,cy = place[0]*40/z + 32,place[1]*40/z + 24
            im = 60 + 180*np.exp(-((x-cx)**2 + (y-cy)**2)/60)[...,None] + rng.normal(0, 15, (48, 64, 3))
            save(Image.fromarray(im.clip(0, 255).astype(np.uint8)), path/person/f'frame_{i:05}_rgb.jpg')
            (path/person/f'frame_{i:05}_pose.txt').write_text('1 0 0\n0 1 0\n0 0 1\n\n' + ' '.join(f'{v:.4f}' for v in place) + '\n')
        (path/person/'rgb.cal').write_text(calibration)

# Tables
groups = ['BL', 'MG', 'SSL', 'TEX', 'TTT', 'WL']
sizes = ['Large', 'Large / Medium', 'Medium', 'Small', 'Mini', 'Compact']

def auctions(seed, n, first, last):
    "Sales of machines; each column that the chapter keeps has a part in the price"
    rng = np.random.default_rng(seed)
    days = (pd.Timestamp(last) - pd.Timestamp(first)).days
    group,base,desc = rng.integers(0, 6, n),rng.integers(0, 12, n),rng.integers(0, 8, n)
    df = pd.DataFrame({'SalesID': np.arange(n) + 1139246 + seed*10**5, 'MachineID': rng.integers(9e5, 2e6, n),
        'ModelID': base*100 + desc, 'datasource': rng.integers(121, 125, n),
        'YearMade': rng.integers(1970, 2010, n), 'MachineHoursCurrentMeter': rng.uniform(0, 2e4, n).round(),
        'UsageBand': rng.choice(['Low', 'Medium', 'High'], n),
        'saledate': [str(pd.Timestamp(first) + pd.Timedelta(days=int(d))) for d in rng.integers(0, days, n)],
        'state': rng.choice(['Texas', 'Florida', 'Ohio', 'Utah'], n),
        'ProductGroup': np.array(groups)[group], 'ProductGroupDesc': [f'{groups[g]} described' for g in group],
        'ProductSize': rng.choice(sizes, n), 'fiModelDesc': [f'{b}{"ABCDEFGH"[d]}' for b,d in zip(base, desc)],
        'fiBaseModel': [f'{b}' for b in base], 'fiModelDescriptor': rng.choice(['L', 'XL', 'LGP'], n),
        'fiSecondaryDesc': rng.choice(['C', 'D', 'E'], n), 'Drive_System': rng.choice(['Two Wheel', 'Four Wheel'], n),
        'Enclosure': rng.choice(['OROPS', 'EROPS', 'EROPS w AC'], n), 'Hydraulics_Flow': rng.choice(['Standard', 'High'], n),
        'Grouser_Tracks': rng.choice(['None', 'Yes'], n), 'Coupler_System': rng.choice(['None', 'Yes'], n)})
    parts = [pd.factorize(df[c], sort=True)[0]*.25 for c in ('ProductSize', 'fiModelDescriptor', 'fiSecondaryDesc', 'Enclosure', 'state')]
    parts += [pd.factorize(df[c], sort=True)[0]*.6 for c in ('Hydraulics_Flow', 'Grouser_Tracks', 'Coupler_System')]
    log = 8.3 + .1*group + .05*base + .05*desc + (df.YearMade-1970)*.015 + sum(parts)*.4 + (df.SalesID%97)*.004 + (df.MachineID%1e5)*3e-6
    df['SalePrice'] = np.exp(log.clip(8.2, 11.8) + rng.normal(0, .05, n)).round()
    df.loc[rng.permutation(n)[:n//10], ['ProductSize', 'MachineHoursCurrentMeter']] = np.nan
    return df

@maker('BLUEBOOK')
def bluebook(path, n=1200):
    auctions(1, n, '2003-01-01', '2012-04-28').sort_values('saledate').to_csv(path/'TrainAndValid.csv', index=False)
    auctions(2, n//10, '2012-05-01', '2012-11-01').drop(columns='SalePrice').to_csv(path/'Test.csv', index=False)
