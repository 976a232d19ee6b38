"""How data becomes noise in a family, and with which samplers it goes back."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
