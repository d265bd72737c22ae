"With the cells marked slow, and those that ask for a GPU where there is one"
flags = 'slow cuda'
