"Small pictures, without random transforms of batches; with the cells marked slow, dropout off"
flags = 'slow'
dropout = False
replace = {'Resize(256': 'Resize(32', '*aug_transforms(size=224), ': '', 'bs=64': 'bs=16'}
