"""The processes of a run: ranks, barriers, signs of life, signals."""
