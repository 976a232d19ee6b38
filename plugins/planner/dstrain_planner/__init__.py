"""What a run needs, before it starts: memory, disk, flags that make it fit, recipes."""
