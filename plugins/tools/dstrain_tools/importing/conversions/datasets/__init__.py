"""What becomes of the keys of a dataset."""
