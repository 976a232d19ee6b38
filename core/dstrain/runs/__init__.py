"""One training run, from its configuration to its last file."""
