"""What scripts and notebooks give a run and get from it, and a loop of their own."""
