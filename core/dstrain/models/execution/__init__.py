"""How a network runs: its blocks, their weights in RAM, checkpointing, compilation, tiles."""
