"Digits are a stand-in"
