"Prices of machines: trees, then a network"
setup = "from tests.foreign.recipes.book.common import start; start(bs=64)"
dropout = False
cell_seconds = 900
replace = {
    '! [ -e /content ] && pip install -Uqq fastbook kaggle waterfallcharts treeinterpreter dtreeviz': '',
    'from dtreeviz.trees import *\n': '',
    "URLs.path(comp)": "untar_data('BLUEBOOK')",
    "df['ProductSize'].cat.set_categories(sizes, ordered=True, inplace=True)":
        "df['ProductSize'] = df['ProductSize'].cat.set_categories(sizes, ordered=True)",
    "df_nn['ProductSize'].cat.set_categories(sizes, ordered=True, inplace=True)":
        "df_nn['ProductSize'] = df_nn['ProductSize'].cat.set_categories(sizes, ordered=True)",
    'max_samples=200_000': 'max_samples=None',
    'max_samples=50000': 'max_samples=None',
    'n_estimators=40': 'n_estimators=40, random_state=0',
    'n_jobs=-1': 'n_jobs=1',
    'max_card=9000': 'max_card=100',
}
skip = {
    'from kaggle import api': 'downloads; not fastai',
    'cred_path = ': 'a password; not fastai',
    'dtreeviz(m': 'dtreeviz is not fastai',
    'plot_partial_dependence': 'gone from scikit-learn; not fastai',
    'treeinterpreter': 'treeinterpreter is not fastai',
    'prediction[0], bias[0]': 'treeinterpreter is not fastai',
    'waterfall(valid': 'waterfallcharts is not fastai',
}
