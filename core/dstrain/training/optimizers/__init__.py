"""Build the optimizer of a run, by name or dotted path, and its learning rates."""
