"""What is asked of a row as a whole."""
