"Small pictures, without random transforms of batches; with the cells marked slow, dropout off"
flags = 'slow'
dropout = False
replace = {'Resize(256': 'Resize(32', '*aug_transforms(size=224), ': '', 'bs=64': 'bs=16'}
known = {'cbs=cutmix)': 'rounding of a ResNet at this rate; a change of the weights by 1e-7 on the CPU gives nearly as much'}
