"Small pictures"
replace = {'Resize(224)': 'Resize(48)', 'convnext_tiny': 'convnext_atto'}
