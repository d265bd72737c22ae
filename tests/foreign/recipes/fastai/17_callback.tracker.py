"As it is"
known = {'lr=100, cbs=TerminateOnNaNCallback':
    'training is meant to diverge, to 1e20, where rounding grows with each step; it ends in the same batch'}
