"The table is a stand-in; dropout off"
dropout = False
