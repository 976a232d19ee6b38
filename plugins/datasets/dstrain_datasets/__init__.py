"""Forms of datasets beside tables of metadata and folders with captions."""
