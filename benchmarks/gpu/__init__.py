"""Measure training steps at published widths, with random weights."""
