"""Build the optimizer of a run, by name or dotted path, and its learning rates."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
