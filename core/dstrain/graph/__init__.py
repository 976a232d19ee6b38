"""Units, inputs, tasks and the plan: what a pipeline declares, and what follows from
it.
"""

from dstrain.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
