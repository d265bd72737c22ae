"Reviews and pretrained weights are stand-ins; dropout off"
dropout = False
