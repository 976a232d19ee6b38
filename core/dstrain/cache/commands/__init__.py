"""What `dstrain cache` does with a feature cache."""
