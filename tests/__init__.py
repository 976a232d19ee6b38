"""The tests of core, and those of the whole."""
