"""Stage 1 of a split run: what fills the feature cache."""
