"""What names a model on a command line: a published id, a folder, a file, or files of components."""
