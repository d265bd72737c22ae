"A small model, in float32; dropout off"
dropout = False
replace = {'bs,sl = 104,72': 'bs,sl = 8,16',
           'config.update({': "config.update({'n_hid': 64, 'emb_sz': 32, 'n_layers': 2, ", 'MixedPrecision(), ': ''}
