"""Every option of the command line as data: its type, bounds and help."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
