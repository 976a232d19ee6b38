"""What the launcher of a run says, and how its processes meet."""
