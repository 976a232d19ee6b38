"""Every option of the command line as data: its type, bounds and help."""
