"Small pictures, a small model; dropout off"
dropout = False
replace = {'size=224': 'size=48', 'Resize(224)': 'Resize(48)', 'tls.dataloaders(': 'tls.dataloaders(bs=16, ', 'dls = dls.cuda()': '',
    'create_body(resnet34(), cut=-2)': 'nn.Sequential(ConvLayer(3, 8, stride=4), ConvLayer(8, 512, stride=4))',
    'fit_one_cycle(4': 'fit_one_cycle(2'}
