"""What becomes of the value of each key, by the names that the tables of tools use."""
