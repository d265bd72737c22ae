"Small pictures; with the cells marked slow, dropout off"
flags = 'slow'
dropout = False
replace = {'Resize(256': 'Resize(64', 'size=224': 'size=32', 'bs=64': 'bs=16'}
