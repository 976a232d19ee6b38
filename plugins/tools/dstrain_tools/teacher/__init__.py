"""Datasets that a model generates, for another one to learn from."""
