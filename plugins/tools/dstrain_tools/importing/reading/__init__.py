"""Read a configuration of another tool, without a look at what its keys mean here."""
