"""Compare values with the kinds that units declare."""

from typing import Any

from PIL import Image
from torch import Tensor

from dstrain.graph import Frames
from dstrain.graph.values import KINDS

CLASSES = ((Tensor, "tensor"), (Image.Image, "image"), (Frames, "video"))


def has_kind(value: Any, kind: str) -> bool:
    """Return whether a value is of a kind as `values.kind_of` names it; of a record,
    only whether it is one.
    """
    if any(_is_plain(value, one) for one in kind.split(" | ")):
        return True
    if kind.startswith("list[") and kind.endswith("]") and isinstance(value, list):
        return all(has_kind(item, kind[len("list[") : -1]) for item in value)
    return kind.startswith("{") and isinstance(value, dict)


def _is_plain(value: Any, kind: str) -> bool:
    return KINDS.get(type(value)) == kind or any(
        isinstance(value, one) and kind == name for one, name in CLASSES
    )
