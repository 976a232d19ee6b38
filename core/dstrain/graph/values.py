"""Name the kinds of values that units exchange, and convert values to a storable form."""

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
# Words for these kinds in headers:
IMAGE = STORED_KINDS["image"]
VIDEO = STORED_KINDS["video"]


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
    """Return the kind of an annotated value, such as 'image | none' or 'list[tensor]'.

    Raises UsageError naming `where` for anything that a feature cache cannot store.
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


def copy_if_shared(value: Any, shared: set[int]) -> Any:
    """Copy tensors that are views or share memory; return the other values as they are.

    So caching one value stores no more than that value, and keeps no other one alive.

    Args:
        value: Any storable value; tensors inside records and lists count, too.
        shared: Ids of storages that other values use; those of the result are added.
    """
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        size = value.numel() * value.element_size()
        is_view = not value.is_contiguous() or storage.nbytes() != size
        if is_view or storage.data_ptr() in shared:
            value = value.clone(memory_format=torch.contiguous_format)
        shared |= storage_ids([value])
        return value
    if isinstance(value, Frames):
        return Frames(copy_if_shared(value.pixels, shared), value.fps)
    if isinstance(value, list):
        return [copy_if_shared(item, shared) for item in value]
    if isinstance(value, dict):
        return {name: copy_if_shared(item, shared) for name, item in value.items()}
    return value


def storage_ids(values: Iterable[Any]) -> set[int]:
    """Return the addresses of the storages of the tensors among the values."""
    tensors = (value for value in values if isinstance(value, Tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def serialize(
    value: Any,
    tensors: dict[str, Tensor],
    name: str,
) -> Any:
    """Put the value's tensors into `tensors`; return the rest, its header, as JSON data.

    Raises UsageError for a value of another type.

    Args:
        value: The value.
        tensors: Gets the tensors, on the CPU.
        name: What the names of the tensors begin with.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return {"value": value}
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu()
        return {"tensor": name, "shape": list(value.shape)}
    if isinstance(value, Image.Image):
        if value.mode not in IMAGE_MODES:
            modes = ", ".join(IMAGE_MODES)
            what = f"an image of mode {value.mode} cannot be stored; modes: {modes}"
            raise UsageError(name, what)
        tensors[name] = torch.from_numpy(np.array(value))
        return {IMAGE: name, "shape": list(tensors[name].shape)}
    if isinstance(value, Frames):
        tensors[name] = value.pixels
        return {VIDEO: name, "fps": value.fps, "shape": list(value.pixels.shape)}
    if isinstance(value, list):
        items = []
        for i, item in enumerate(value):
            items.append(serialize(item, tensors, f"{name}/{i}"))
        return {"list": items}
    if isinstance(value, dict):
        record = {}
        for key, item in value.items():
            record[key] = serialize(item, tensors, f"{name}/{key}")
        return {"record": record}
    raise UsageError(name, f"a value of type {type(value).__name__} cannot be stored")


def deserialize(header: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild a value from the header and the tensors that `serialize` separated."""
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
    """Return the names of the tensors of a value, in the order they were stored."""
    for kind in ("tensor", IMAGE, VIDEO):
        if kind in header:
            return [header[kind]]
    children = header.get("list") or list(header.get("record", {}).values())
    return [name for child in children for name in tensor_names(child)]
