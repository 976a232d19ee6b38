"""What a training step computes: losses, batches, and the order of samples."""
