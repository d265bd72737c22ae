"With the cells marked slow, and those that ask for a GPU where there is one"
flags = 'slow cuda'
known = {'class _NOutModel': 'the model makes a CPU tensor in its forward, `torch.randn` without a device; so it fails on a GPU',
    'cbs = [TstCallback(), ActivationStats()])': 'asks two ways of computing a mean for equal floats; they differ in the last digit'}
