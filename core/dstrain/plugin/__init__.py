"""Everything that the package of a model family imports, in one place.

`dstrain.plugin.functional` has the tensor functions that families share. Each name
loads on first use, so that a family's record imports no torch.
"""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
