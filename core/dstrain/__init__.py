"""Train diffusion models with the code that runs them for inference.

These are the names for users' scripts; those for authors of a family are in
`dstrain.plugin`. Each loads on first use, so that `import dstrain` imports no torch.
"""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
