"""Estimate how much memory and disk a run needs, before any weight is opened."""
