"""Ready configurations: what is trained, on which card, from which source."""
