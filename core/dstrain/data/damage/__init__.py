"""Tell damage of a file from faults of the machine."""
