"""Convert the values that units exchange to a storable form, and back."""

import math
import re
import types
import typing
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dstrain.errors import UsageError
from dstrain.storage import tensor_bytes


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


IMAGE_MODES = ("L", "RGB", "RGBA")
DTYPES = frozenset(getattr(torch, name) for name in tensor_bytes.DTYPES)
"""The dtypes that safetensors has."""
MAX_BITS = 4096
"""Python refuses to write much longer integers as decimals."""
MAX_DEPTH = 64
STORABLE = f"""what can be: Tensor of a dtype of safetensors, str, int, float, bool, None, \
image ({", ".join(IMAGE_MODES)}), Frames; lists and records of these"""


def copy_value(value: Any, where: str, name: str, depth: int = 0) -> Any:
    """Return a copy of a unit's output, or of a part of it, that shares nothing with
    anything else: exactly the value that stage 2 would read from the feature cache, so
    contiguous, and an image without `info`.

    A unit may return a view, the same buffer at every call, or a weight. Raises
    UsageError, naming what returned it and the way to the part ('facts/layers/0'), for
    a value that cannot be stored exactly.
    """
    if fault := _fault(value, depth):
        what = f"output {name!r} cannot be stored exactly: {fault}"
        raise UsageError(where, what, STORABLE)
    if isinstance(value, Tensor):
        # A clone of a view that is conjugated or negated lazily would be one as well.
        plain = value.resolve_conj().resolve_neg()
        return plain.clone(memory_format=torch.contiguous_format)
    if isinstance(value, Image.Image):
        image = value.copy()
        image.info = {}
        return image
    if isinstance(value, Frames):
        pixels = copy_value(value.pixels, where, f"{name}/pixels", depth + 1).cpu()
        return Frames(pixels, copy_value(value.fps, where, f"{name}/fps", depth + 1))
    if isinstance(value, list):
        return [
            copy_value(item, where, f"{name}/{i}", depth + 1)
            for i, item in enumerate(value)
        ]
    if isinstance(value, dict):
        return {
            key: copy_value(item, where, f"{name}/{key}", depth + 1)
            for key, item in value.items()
        }
    if value != value:  # only NaN is not itself
        return math.nan  # JSON has only one: that of either sign
    return value


def _fault(value: Any, depth: int = 0) -> str:
    """Say why a value, its parts aside, cannot be stored exactly; '' if it can."""
    if isinstance(value, Tensor):
        return _tensor_fault(value)
    if isinstance(value, Image.Image):
        if value.mode in IMAGE_MODES:
            return ""
        return f"an image of mode {value.mode}"
    # Exactly these types: a numpy float is a float too, and would come back as another.
    if type(value) not in (str, bool, int, float, type(None), list, dict, Frames):
        return f"a value of type {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return f"an integer of more than {MAX_BITS} bits"
    if depth > MAX_DEPTH:
        return f"lists and records nested more than {MAX_DEPTH} deep"
    texts = [value] if isinstance(value, str) else []
    if isinstance(value, dict):
        texts = list(value)
        for key in texts:
            if not isinstance(key, str) or "/" in key:
                return f"a record with the key {key!r}"
    # UTF-8 cannot encode it.
    if any(re.search("[\ud800-\udfff]", text) for text in texts):
        return "a text with half of a surrogate pair"
    return ""


def _tensor_fault(tensor: Tensor) -> str:
    # A subclass may keep more than its numbers.
    if type(tensor) not in PLAIN_TENSORS.get():
        return f"a tensor of class {type(tensor).__name__}"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"a tensor that is nested or sparse ({tensor.layout})"
    if tensor.is_meta:
        return "a tensor without data, on the device 'meta'"
    if tensor.dtype not in DTYPES:
        return f"a tensor of dtype {tensor.dtype}"
    return ""


PLAIN_TENSORS: ContextVar[tuple[type, ...]] = ContextVar(
    "PLAIN_TENSORS", default=(Tensor, nn.Parameter)
)
"""Classes of tensors that keep nothing beside their numbers. Where memory is estimated,
there are also tensors that stand for one of these.
"""


def serialize(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Put the value's tensors into `tensors`, on the CPU, under names that begin with
    `name`; return the rest, its header, as JSON data.

    Raises UsageError for a value that cannot be stored exactly.
    """
    if fault := _fault(value):
        raise UsageError(name, f"cannot be stored exactly: {fault}", STORABLE)
    if value is None or isinstance(value, str | bool | int | float):
        return {"value": value}
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu()
        return {"tensor": name, "shape": list(value.shape)}
    if isinstance(value, Image.Image):
        tensors[name] = torch.from_numpy(np.array(value))
        return {"image": name, "shape": list(tensors[name].shape)}
    if isinstance(value, Frames):
        tensors[name] = value.pixels
        return {"video": name, "fps": value.fps, "shape": list(value.pixels.shape)}
    if isinstance(value, list):
        items = []
        for i, item in enumerate(value):
            items.append(serialize(item, tensors, f"{name}/{i}"))
        return {"list": items}
    record = {}
    for key, item in value.items():
        record[key] = serialize(item, tensors, f"{name}/{key}")
    return {"record": record}


def deserialize(header: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild a value from the header and the tensors that `serialize` separated."""
    if "value" in header:
        return header["value"]
    if "tensor" in header:
        return tensors[header["tensor"]]
    if "image" in header:
        return Image.fromarray(tensors[header["image"]].numpy())
    if "video" in header:
        return Frames(tensors[header["video"]], header["fps"])
    if "list" in header:
        return [deserialize(item, tensors) for item in header["list"]]
    return {key: deserialize(item, tensors) for key, item in header["record"].items()}
