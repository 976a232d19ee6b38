"""How a network runs: its blocks, gradient checkpointing, stored weights."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
