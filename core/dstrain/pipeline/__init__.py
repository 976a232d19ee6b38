"""A pipeline spec filled with components, and inference with it."""
