"""Fill a network that is built without memory from files, strictly in both directions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from dstrain.errors import StateError, first_few, reading
from dstrain.models.components import Component, Files
from dstrain.models.formats import NATIVE, Config, Shapes, fits, shapes_of
from dstrain.models.placing import Place, keep, put, tied_names
from dstrain.models.weights import Weights


def empty_network(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network whose weights have shapes and take no memory."""
    # Slow to import, and planning needs this module but no weights.
    from accelerate import init_empty_weights

    # Buffers are computed by the constructor and are not in the files, so they must be
    # real.
    with init_empty_weights(include_buffers=False):
        return build()


def empty_component(component: Component, config: Config) -> nn.Module | None:
    """Build the network of a component, as `empty_network` does, for the content of a
    config.json; return None if it cannot be built without files.
    """
    build: Any = getattr(component.network, "build", None)
    if build is None:
        return None
    with reading(f"config.json of {component.name}"):
        return empty_network(partial(build, component.configure(config)))


def load_network(
    build: Callable[[], nn.Module],
    files: Files,
    dtype: torch.dtype,
    place: Place = keep,
) -> nn.Module:
    """Build a network and fill it from its files, weight by weight; it is in eval mode.

    Weights that a network of transformers declares to be tied may be in the files once.
    Raises StateError, before any weight is read, when keys or shapes of files and
    network differ. Buffers that no file has stay on the CPU. `dtype` is that of all
    floating-point weights as they are read, if the network has no `weights_dtype`.
    """
    with reading(files.folder / "config.json"):
        network = empty_network(build)
    weights = check_files(network, files)
    wanted = shapes_of(network.state_dict())
    dtype = getattr(network, "weights_dtype", dtype)
    for name, weight in weights.read(wanted, dtype):
        put(network, name, place(network, name, weight))
        del weight  # else it would live until the next one is read
    if tied_names(network):
        network.tie_weights(missing_keys=set())  # type: ignore[operator]  # of transformers: those whose values are equal
    return network.eval()


def check_files(network: nn.Module, files: Files) -> Weights:
    """Return a network's weights in its files, not read yet, each of tied ones present.

    Raises StateError when keys or shapes of files and network differ.
    """
    tied: Mapping[str, str] = getattr(network, "all_tied_weights_keys", {})
    weights = Weights.of(files)
    parts = dict(weights.parts)
    for one, other in tied.items():
        if other in parts:
            parts.setdefault(one, parts[other])
        elif one in parts:
            parts[other] = parts[one]
    weights = replace(weights, parts=parts)
    wanted = shapes_of(network.state_dict())
    _check_fit(wanted, weights, files, type(network).__name__)
    return weights


def _check_fit(wanted: Shapes, weights: Weights, files: Files, network: str) -> None:
    """Raise StateError with examples, in the files' keys, of what is missing,
    unexpected or of a different shape.
    """
    checkpoint_format = files.checkpoint_format
    have = weights.shapes
    exact = checkpoint_format is NATIVE
    used: set[str] = set()
    missing: list[str] = []
    misshapen: list[str] = []
    for ours, shape in wanted.items():
        if ours not in have:
            name = files.prefix + checkpoint_format.original(ours)
            if name not in missing:  # as several weights are parts of one in the files
                missing.append(name)
            continue
        used.update(part.name for part in weights.parts[ours])
        if have[ours] != shape and (exact or not fits(have[ours], shape)):
            parts = weights.parts[ours]
            theirs = " + ".join(files.prefix + part.name for part in parts)
            misshapen.append(f"{theirs} (expected {shape}, found {have[ours]})")
    unexpected = [
        tensor.name
        for name, tensor in weights.tensors.items()
        if name not in used and not checkpoint_format.ignores(name)
    ]
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of a different shape": misshapen,
    }
    found = ((kind, names) for kind, names in problems.items() if names)
    lines = [f"{len(names)} {kind}: {first_few(names)}" for kind, names in found]
    if lines:
        what = f"these files do not fit {network}, which has {len(wanted)} weights"
        raise StateError(files.folder, what, *lines)
