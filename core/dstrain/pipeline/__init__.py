"""Fill a pipeline spec with components, and run inference with it."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
