"Reviews and pretrained weights are stand-ins, few epochs; dropout off"
dropout = False
replace = {'fit_one_cycle(10': 'fit_one_cycle(2', 'fine_tune(4': 'fine_tune(2', 'N_WORDS = 40': 'N_WORDS = 4'}
