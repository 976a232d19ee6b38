"""Compare the names and shapes of weights with those of published files."""

import hashlib
from collections.abc import Mapping
from typing import Any

Layout = Mapping[str, Any]
"""Name -> the shape of a tensor, or the layout of a dictionary in a file."""


def layout_digest(shapes: Layout) -> str:
    """Return the MD5 by which DiffSynth-Studio knows the weights of a model
    (`hash_model_file` of diffsynth/core/loader/file.py).

    Args:
        shapes: Those of all shards of the model.
    """
    described = _described(shapes).encode()
    return hashlib.md5(described, usedforsecurity=False).hexdigest()


def _described(shapes: Layout) -> str:
    """Return the names, each with and without its shape, sorted and joined by commas."""
    found = []
    for name, shape in shapes.items():
        if isinstance(shape, Mapping):
            found.append(f"{name}|{_described(shape)}")
        else:
            found += [f"{name}:{'_'.join(map(str, shape))}", name]
    return ",".join(sorted(found))
