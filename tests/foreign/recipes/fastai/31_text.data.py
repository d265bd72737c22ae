"Reviews are a stand-in; with the cell marked slow"
flags = 'slow'
skip = {'[[2,8,21,29,25,97]]': "expects the numbers of the real reviews' words", 'SentencePieceTokenizer': 'sentencepiece is not installed'}
