"""Tables and files to values, and values to files."""
