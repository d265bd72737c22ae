"As it is"
