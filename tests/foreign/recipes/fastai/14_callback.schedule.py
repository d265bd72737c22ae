"With the cells marked slow"
flags = 'slow'
