"With the cells marked slow; dropout off"
flags = 'slow'
dropout = False
