"""How a network runs: its blocks, their weights in RAM, checkpointing, compilation, tiles."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
