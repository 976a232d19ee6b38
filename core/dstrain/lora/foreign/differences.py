"""The keys of differences of whole parameters, beside or in place of LoRA layers.

ComfyUI (comfy/lora.py) adds `<layer>.diff` to a weight, `.diff_b` to a bias, and `.diff`
also to a parameter of that name. LightX2V, whose files for fewer steps have them, writes
`.diff_m` for a parameter `modulation`. LyCORIS has `.w_norm` and `.b_norm` of norms.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dstrain.errors import StateError, UsageError
from dstrain.lora.key_names import Rows, parameter_rows
from dstrain.models import Shapes, StoredLinear
from dstrain.models.formats import CheckpointFormat, Shape, fits

DIFFERENCE = re.compile(r"(?P<layer>.+)\.(?P<kind>diff(?:_[bm])?|[wb]_norm)")
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


class DifferenceKey(NamedTuple):
    """What a file calls the difference of a parameter."""

    layer: str
    kind: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.kind}"


Differences = Mapping[DifferenceKey, Tensor]
DifferenceTable = Mapping[DifferenceKey, tuple[Rows, ...]]
"""A difference's key in files -> the parameters of the network it is of."""


def split_differences(
    path: Path, tensors: Mapping[str, Tensor]
) -> tuple[dict[DifferenceKey, Tensor], dict[str, Tensor]]:
    """Return the differences in a file, and its other tensors; raises StateError for
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
        found[DifferenceKey(hit["layer"], hit["kind"])] = tensor
    return found, others


def difference_table(
    checkpoint_format: CheckpointFormat, shapes: Shapes, underscored: bool
) -> DifferenceTable:
    """Return the keys of a network's parameters in files with this format's names."""
    found: dict[DifferenceKey, tuple[Rows, ...]] = {}
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
                key = DifferenceKey(layer, kind)
                if found.setdefault(key, rows) != rows:
                    twice.add(key)
    return {key: rows for key, rows in found.items() if key not in twice}


def difference_fits(tensor: Tensor, rows: Sequence[Rows], shapes: Shapes) -> bool:
    """Return whether a difference has the shape of the parameters that it stands for."""
    if len(rows) == 1 and fits(tuple(tensor.shape), shapes[rows[0].layer]):
        return True
    height = max(one.stop for one in rows)
    if tensor.ndim == 0 or len(tensor) != height:
        return False
    return all(
        fits(tuple(tensor.shape[1:]), tuple(shapes[one.layer][1:])) for one in rows
    )


def own_differences(
    path: Path, differences: Differences, table: DifferenceTable, shapes: Shapes
) -> dict[str, Tensor]:
    """Return the differences by the network's own names, in its shapes; raises
    StateError for one of another shape, or of a part of a parameter.
    """
    pieces: dict[str, dict[int, Tensor]] = {}
    for key, tensor in differences.items():
        for one in table[key]:
            stored = tensor
            if len(table[key]) > 1:
                stored = tensor[one.start : one.stop]
            same = pieces.setdefault(one.layer, {})
            if one.offset in same:
                raise StateError(path, f"has two differences of {one.layer}")
            same[one.offset] = stored
    found = {}
    for name, parts in pieces.items():
        wanted: Shape = shapes[name]
        ordered = [parts[offset] for offset in sorted(parts)]
        whole = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
        if not fits(tuple(whole.shape), wanted):
            what = f"has a difference of {name} of shape {tuple(whole.shape)}, but it is {wanted}"
            raise StateError(path, what)
        found[name] = whole.reshape(wanted)
    return found


def own_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """Return a network's parameter by the name that it has without LoRA layers; raises
    UsageError for one that is quantized.
    """
    layer, _, end = name.rpartition(".")
    owner = module.get_submodule(layer)
    owner = getattr(owner, "base_layer", owner)
    if end == "weight" and isinstance(owner, StoredLinear):
        what = f"contains a difference of {name}, which is quantized"
        raise UsageError("--lora", what, "leave that component as it is loaded")
    parameter: nn.Parameter = getattr(owner, end)
    return parameter


@torch.no_grad()
def add_differences(
    module: nn.Module, differences: Mapping[str, Tensor], scale: float = 1.0
) -> None:
    """Add `scale` times these differences to a network's own parameters, computed in
    fp32 and rounded to their dtype; raises UsageError, before any is added, for a
    parameter that is quantized.
    """
    own = {name: own_parameter(module, name) for name in differences}
    for name, parameter in own.items():
        parameter.copy_(changed_by(parameter, differences[name], scale))


def changed_by(parameter: Tensor, difference: Tensor, scale: float) -> Tensor:
    """Return a parameter with `scale` times a difference, in its dtype."""
    added = scale * difference.float().to(parameter.device)
    return (parameter.float() + added).to(parameter.dtype)
