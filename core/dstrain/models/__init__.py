"""Model files to networks."""
