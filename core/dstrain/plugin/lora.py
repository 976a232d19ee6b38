"""What plugins with formats of LoRA files, or types of LoRA layers, are made of."""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
