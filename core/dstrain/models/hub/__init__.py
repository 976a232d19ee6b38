"""Find published models on this machine and on hubs, and download them."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
