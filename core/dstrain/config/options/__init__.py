"""Every option of a training run and of `dstrain generate`: its type, default, bounds, help and effects."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
