"""The forms in which people have datasets, each read as one table."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
