"""The command line: words to calls."""
