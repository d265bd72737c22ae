"Ratings are a stand-in"
