"""One training run, from its configuration to its last file."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
