"Few pictures"
replace = {'bs = 128': 'bs = 32'}
