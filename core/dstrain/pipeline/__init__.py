"""Fill a pipeline spec with components, and run inference with it."""
