"""Generate one image or video."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
