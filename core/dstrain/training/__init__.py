"""Compute training steps: losses, batches, and the order of samples."""
