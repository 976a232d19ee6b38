"""Where the datasets of a run are, and what is said of them."""
