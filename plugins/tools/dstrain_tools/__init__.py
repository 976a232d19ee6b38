"""Commands around training: what comes before it, and from other programs."""
