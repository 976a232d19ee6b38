"""The keys of differences of whole parameters, beside or in place of LoRA layers.

ComfyUI (comfy/lora.py) adds `<layer>.diff` to a weight, `.diff_b` to a bias, and `.diff`
also to a parameter of that name. LightX2V, whose files for fewer steps have them, writes
`.diff_m` for a parameter `modulation`. LyCORIS has `.w_norm` and `.b_norm` of norms.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from dstrain.plugin import CheckpointFormat, Shapes
from dstrain.plugin.lora import (
    KeyTable,
    Layer,
    LoraType,
    Rows,
    StateError,
    StoredLayer,
    fits,
)
from torch import Tensor

from dstrain_formats.key_names import parameter_rows

DIFFERENCE = re.compile(r".+\.(?P<kind>diff(?:_[bm])?|[wb]_norm)")
ENDINGS = MappingProxyType(
    {
        "diff": (".weight", ""),
        "diff_b": (".bias",),
        "diff_m": (".modulation",),
        "w_norm": (".weight",),
        "b_norm": (".bias",),
    }
)
"""The end of a key -> what the names of parameters end with that it may stand for."""


@dataclass(frozen=True)
class Difference(Layer):
    """What is added to a parameter."""

    tensor: Tensor
    type = "differences of whole weights"
    rank = 1

    @property
    def acts(self) -> bool:
        """Return whether it changes the parameter."""
        return bool(self.tensor.any())

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether it is for a parameter of this shape, but for axes of length 1."""
        return fits(tuple(self.tensor.shape), shape)

    def changed(self, weight: Tensor) -> Tensor:
        """Return the fp32 parameter with the difference."""
        return weight + self.tensor.float().to(weight.device)

    def parts(self) -> dict[str, Tensor]:
        """Return the difference."""
        return {"diff": self.tensor}


class DifferenceType(LoraType):
    """Differences, which are read and not trained."""

    name = "difference"
    keys = r"diff(?:_[bm])?|[wb]_norm"

    def has_alpha(self, parts: Mapping[str, Tensor]) -> bool:
        """Return False: no alpha says anything of it."""
        return False

    def layer(
        self, parts: Mapping[str, Tensor], rank: int | None, alpha: float | None
    ) -> Difference:
        """Return the difference."""
        return Difference(*parts.values())


def split_differences(
    path: Path, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, StoredLayer], dict[str, Tensor]]:
    """Return the differences in a file by their keys, and its other tensors; raises StateError for
    values that are not finite numbers.
    """
    found = {}
    others = {}
    for key, tensor in tensors.items():
        hit = DIFFERENCE.fullmatch(key)
        if hit is None:
            others[key] = tensor
            continue
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise StateError(path, f"{key} is not an array of finite numbers")
        found[key] = StoredLayer(DifferenceType(), {hit["kind"]: tensor})
    return found, others


def difference_table(
    checkpoint_format: CheckpointFormat, shapes: Shapes, underscored: bool
) -> KeyTable:
    """Return the keys of a network's parameters in files with this format's names."""
    found: dict[str, tuple[Rows, ...]] = {}
    twice = set()
    for name, rows in parameter_rows(checkpoint_format, shapes).items():
        for kind, endings in ENDINGS.items():
            for ending in endings:
                if not name.endswith(ending) or name == ending:
                    continue
                layer = name.removesuffix(ending)
                if ending == "" and name.endswith((".weight", ".bias")):
                    continue
                if underscored:
                    layer = layer.replace(".", "_")
                key = f"{layer}.{kind}"
                if found.setdefault(key, rows) != rows:
                    twice.add(key)
    return {key: rows for key, rows in found.items() if key not in twice}


def difference_fits(one: Difference, rows: Sequence[Rows], shapes: Shapes) -> bool:
    """Return whether a difference has the shape of the parameters that it stands for."""
    tensor = one.tensor
    if len(rows) == 1 and one.fits(shapes[rows[0].layer]):
        return True
    height = max(one.stop for one in rows)
    if tensor.ndim == 0 or len(tensor) != height:
        return False
    return all(
        fits(tuple(tensor.shape[1:]), tuple(shapes[one.layer][1:])) for one in rows
    )


def own_differences(
    path: Path, differences: Mapping[str, Difference], table: KeyTable, shapes: Shapes
) -> dict[str, Difference]:
    """Return the differences by the network's own names, in its shapes; raises
    StateError for one of another shape, or of a part of a parameter.
    """
    pieces: dict[str, dict[int, Tensor]] = {}
    for key, difference in differences.items():
        for one in table[key]:
            stored = difference.tensor
            if len(table[key]) > 1:
                stored = stored[one.start : one.stop]
            same = pieces.setdefault(one.layer, {})
            if one.offset in same:
                raise StateError(path, f"has two differences of {one.layer}")
            same[one.offset] = stored
    found = {}
    for name, parts in pieces.items():
        wanted = shapes[name]
        ordered = [parts[offset] for offset in sorted(parts)]
        whole = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
        if not fits(tuple(whole.shape), wanted):
            what = f"has a difference of {name} of shape {tuple(whole.shape)}, but it is {wanted}"
            raise StateError(path, what)
        found[name] = Difference(whole.reshape(wanted))
    return found
