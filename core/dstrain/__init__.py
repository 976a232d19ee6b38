"""Train diffusion models with the code that runs them for inference.

These are the names for users' scripts; those for authors of a family are in
`dstrain.plugin`. Each loads on first use, so that `import dstrain` imports no torch.
"""

import sys
from typing import Any

from dstrain.console import status
from dstrain.lazy import attach

_load, __dir__, __all__ = attach(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Load a name; a terminal shows that this takes seconds where torch comes with it."""
    if name not in __all__ or "torch" in sys.modules:
        return _load(name)
    with status():
        return _load(name)
