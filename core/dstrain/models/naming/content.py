"""Tell the family of model files by the names of their weights."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from dstrain.errors import UsageError
from dstrain.models.components import Component, Files, components_of
from dstrain.models.naming.folders import SAFETENSORS, loose_weights, weight_sets
from dstrain.models.weights import find_weights
from dstrain.registry import ModelFamily


def families_of(path: Path, families: Iterable[ModelFamily]) -> list[ModelFamily]:
    """Return the families whose denoiser a file or folder has, else those that have any of its
    weights.

    Raises StateError for a file that cannot be read, and MissingFiles for absent shards.
    """
    named = [(files, list(find_weights(files.paths))) for files in _weights_in(path)]
    by_denoiser = []
    by_any = []
    for family in families:
        try:
            known = components_of(family)
        except UsageError:
            continue  # it cannot be used either
        denoiser = known.get(family.default_trainable)
        found = [one for one in known.values() if _has(one, named)]
        if denoiser is not None and any(
            one is denoiser or one.same_keys_as(denoiser) for one in found
        ):
            by_denoiser.append(family)
        elif found:
            by_any.append(family)
    return by_denoiser or by_any


def _has(component: Component, named: Sequence[tuple[Files, list[str]]]) -> bool:
    """Return whether some of these files, each with its keys, are a component's."""
    return any(component.part_of(files, names) is not None for files, names in named)


def _weights_in(path: Path) -> list[Files]:
    """Return the file, or the files of weights in the folder and those below it."""
    if not path.is_dir():
        return [Files((path,))]
    inside = path.glob(f"*/*{SAFETENSORS}")
    return [
        Files(tuple(paths)) for paths in weight_sets({*loose_weights(path), *inside})
    ]
