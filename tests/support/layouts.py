"""Digests of the names and shapes of weights, by which published files are listed
without being here.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.models.components import Component
from dstrain.models.formats import (
    NATIVE,
    CheckpointFormat,
    checkpoint_shapes,
    shapes_of,
)
from dstrain.models.networks import empty_component


def layout_digest(
    component: Component,
    config: Mapping[str, Any] | Path,
    checkpoint_format: CheckpointFormat = NATIVE,
) -> str:
    """Return the digest of the tensors that a component has in files of a format, as
    DiffSynth-Studio lists published files: the md5 of all 'NAME:SIDE_SIDE' and 'NAME',
    sorted and joined by commas.

    config: The content of its config.json, or the file.
    """
    if isinstance(config, Path):
        config = json.loads(config.read_bytes())
    network = empty_component(component, config)
    assert network is not None
    shapes = checkpoint_shapes(checkpoint_format, shapes_of(network.state_dict()))
    entries = list(shapes)
    for name, shape in shapes.items():
        entries.append(f"{name}:{'_'.join(map(str, shape))}")
    return hashlib.md5(",".join(sorted(entries)).encode()).hexdigest()
