"""Name the kinds of values that units exchange."""

import types
import typing
from dataclasses import dataclass
from typing import Any, Union

from PIL import Image
from torch import Tensor

from dstrain.errors import UsageError


@dataclass(frozen=True)
class Frames:
    """Frames of a decoded video."""

    pixels: Tensor
    """uint8 (frames, height, width, 3)."""
    fps: float
    """Frames per second."""


KINDS = types.MappingProxyType(
    {
        Tensor: "tensor",
        Image.Image: "image",
        Frames: "video",
        str: "str",
        int: "int",
        float: "float",
        bool: "bool",
        type(None): "none",
    }
)


def kind_of(annotation: Any, where: str) -> str:
    """Return the kind of an annotated value, such as 'image | none' or 'list[tensor]';
    raises UsageError naming `where` for what a feature cache cannot store.
    """
    if annotation in KINDS:
        return KINDS[annotation]
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(kind_of(argument, where) for argument in arguments)
    if origin is list and len(arguments) == 1:
        return f"list[{kind_of(arguments[0], where)}]"
    if typing.is_typeddict(annotation):
        fields = []
        for name, hint in typing.get_type_hints(annotation).items():
            fields.append(f"{name}: {kind_of(hint, where)}")
        return "{" + ", ".join(fields) + "}"
    raise UsageError(
        where,
        f"{annotation!r} is not a kind of value that can be stored",
        "kinds: Tensor, str, int, float, bool, None, Image, Frames, list[...] and TypedDict records of these",
    )
