"""Digests of the names and shapes of weights, by which published files are listed
without being here.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.models import NATIVE, empty_component
from dstrain.models.formats import Shape, checkpoint_shapes, shapes_of
from dstrain.plugin import CheckpointFormat, Component


def layout_shapes(
    component: Component,
    config: Mapping[str, Any] | Path,
    checkpoint_format: CheckpointFormat = NATIVE,
) -> dict[str, Shape]:
    """Return the name and shape of each tensor that a component has in files of a format;
    tied weights once.

    config: The content of its config.json, or the file.
    """
    if isinstance(config, Path):
        config = json.loads(config.read_bytes())
    network: Any = empty_component(component, config)
    assert network is not None
    tied: Mapping[str, str] = getattr(network, "all_tied_weights_keys", {})
    shapes = shapes_of(network.state_dict())
    own = {name: shape for name, shape in shapes.items() if name not in tied}
    return checkpoint_shapes(checkpoint_format, own)


def layout_digest(
    component: Component,
    config: Mapping[str, Any] | Path,
    checkpoint_format: CheckpointFormat = NATIVE,
) -> str:
    """Return the digest of what `layout_shapes` returns."""
    return digest_of(layout_shapes(component, config, checkpoint_format))


Layout = Mapping[str, Any]
"""Name -> the shape of a tensor, or the layout of a dictionary in a file."""


def digest_of(shapes: Layout) -> str:
    """Return the digest of tensors as DiffSynth-Studio lists published files: the md5 of
    all 'NAME:SIDE_SIDE' and 'NAME', sorted and joined by commas.
    """
    return hashlib.md5(_described(shapes).encode()).hexdigest()


def _described(shapes: Layout) -> str:
    """All entries of a file, or of a dictionary in it."""
    entries = []
    for name, shape in shapes.items():
        if isinstance(shape, Mapping):
            entries.append(f"{name}|{_described(shape)}")
        else:
            entries += [f"{name}:{'_'.join(map(str, shape))}", name]
    return ",".join(sorted(entries))
