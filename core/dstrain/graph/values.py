"""Values that units exchange: their kinds, checked when a pipeline is built, and their
storable form.
"""

import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dstrain.errors import UsageError
from dstrain.graph.inputs import STORED_KINDS

IMAGE_MODES = ("L", "RGB", "RGBA")
IMAGE, VIDEO = STORED_KINDS["image"], STORED_KINDS["video"]
SCALARS = types.MappingProxyType(
    {str: "str", int: "int", float: "float", bool: "bool", type(None): "none"}
)


@dataclass(frozen=True)
class Frames:
    """Frames of a video as decoded: `pixels` is uint8 (frames, height, width, 3), `fps`
    is frames per second.
    """

    pixels: Tensor
    fps: float


def kind_of(annotation: Any, where: str) -> str:
    """Name the kind of an annotated value, such as 'tensor', 'image | none' or
    'list[tensor]'.

    Raises UsageError naming `where` for anything a feature store could not keep.
    """
    plain = {Tensor: "tensor", Image.Image: "image", Frames: "video", **SCALARS}
    if annotation in plain:
        return plain[annotation]
    if annotation is None:
        return "none"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(kind_of(argument, where) for argument in arguments)
    if origin is list and len(arguments) == 1:
        return f"list[{kind_of(arguments[0], where)}]"
    if typing.is_typeddict(annotation):
        fields = typing.get_type_hints(annotation)
        return (
            "{"
            + ", ".join(
                f"{name}: {kind_of(kind, where)}" for name, kind in fields.items()
            )
            + "}"
        )
    raise UsageError(
        where,
        f"{annotation!r} is not a kind of value that can be stored",
        "kinds: Tensor, str, int, float, bool, None, Image, Frames, list[...] and TypedDict records of these",
    )


def copy_if_shared(value: Any, held: set[int]) -> Any:
    """Return the value with every tensor contiguous and alone in its storage, so that
    storing it keeps no more.

    held: addresses of storages that something else holds; those of the result are
    added.
    """
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        whole = (
            value.is_contiguous()
            and storage.nbytes() == value.numel() * value.element_size()
        )
        mine = (
            value
            if whole and storage.data_ptr() not in held
            else value.clone(memory_format=torch.contiguous_format)
        )
        held.add(mine.untyped_storage().data_ptr())
        return mine
    if isinstance(value, Frames):
        return Frames(copy_if_shared(value.pixels, held), value.fps)
    if isinstance(value, list):
        return [copy_if_shared(item, held) for item in value]
    if isinstance(value, dict):
        return {name: copy_if_shared(item, held) for name, item in value.items()}
    return value


def storage_ids(values: Iterable[Any]) -> set[int]:
    """The addresses of the storages behind the tensors among values."""
    return {
        value.untyped_storage().data_ptr()
        for value in values
        if isinstance(value, Tensor)
    }


def serialize(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Put the value's tensors into `tensors` under names that begin with `name`; return
    the rest as JSON data.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return {"value": value}
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu()
        return {"tensor": name, "shape": list(value.shape)}
    if isinstance(value, Image.Image):
        if value.mode not in IMAGE_MODES:
            raise UsageError(
                name,
                f"an image of mode {value.mode} cannot be stored; modes: {', '.join(IMAGE_MODES)}",
            )
        tensors[name] = torch.from_numpy(np.array(value))
        return {IMAGE: name, "shape": list(tensors[name].shape)}
    if isinstance(value, Frames):
        tensors[name] = value.pixels
        return {VIDEO: name, "fps": value.fps, "shape": list(value.pixels.shape)}
    if isinstance(value, list):
        return {
            "list": [
                serialize(item, tensors, f"{name}/{i}") for i, item in enumerate(value)
            ]
        }
    if isinstance(value, dict):
        return {
            "record": {
                key: serialize(item, tensors, f"{name}/{key}")
                for key, item in value.items()
            }
        }
    raise UsageError(name, f"a value of type {type(value).__name__} cannot be stored")


def deserialize(header: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild a value from what `flatten` returned and the tensors it put aside."""
    if "value" in header:
        return header["value"]
    if "tensor" in header:
        return tensors[header["tensor"]]
    if IMAGE in header:
        return Image.fromarray(tensors[header[IMAGE]].numpy())
    if VIDEO in header:
        return Frames(tensors[header[VIDEO]], header["fps"])
    if "list" in header:
        return [deserialize(item, tensors) for item in header["list"]]
    return {key: deserialize(item, tensors) for key, item in header["record"].items()}


def tensor_names(header: Any) -> list[str]:
    """List the names under which `flatten` put aside the tensors of a value."""
    for kind in ("tensor", IMAGE, VIDEO):
        if kind in header:
            return [header[kind]]
    children = header.get("list") or list(header.get("record", {}).values())
    return [name for child in children for name in tensor_names(child)]
