"""The forms in which people have datasets, each read as one table."""
