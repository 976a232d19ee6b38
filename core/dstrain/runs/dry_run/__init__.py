"""Say what a run would do, and check what it would check, for `--dry_run`."""
