"Small pictures, a small model; dropout off"
dropout = False
replace = {'size=224': 'size=48', 'Resize(224)': 'Resize(48)', 'resnet34': 'resnet18', 'tls.dataloaders(': 'tls.dataloaders(bs=16, ', 'dls = dls.cuda()': '',
    'fit_one_cycle(4': 'fit_one_cycle(2'}
