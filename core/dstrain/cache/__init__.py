"""The content-addressed feature cache."""
