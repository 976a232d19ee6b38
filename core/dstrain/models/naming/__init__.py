"""What names a model on a command line: a published id, a folder, a file, or files of components."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
