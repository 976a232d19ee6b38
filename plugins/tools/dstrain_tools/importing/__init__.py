"""Configurations of other tools as files of `--config`."""
