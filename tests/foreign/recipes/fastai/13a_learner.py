"As it is"
targets = 'compares what the model on the device gives with targets on the CPU; so does fastai on a GPU'
known = {'x,y = learn.dls.valid_ds.tensors\ntest_close': targets, 'x,y = learn.dls.train_ds.tensors\ntest_close': targets}
