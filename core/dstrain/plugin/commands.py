"""What plugins that bring commands are made of: the terminal, options and families."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
