"""Lay tensors out as safetensors files have them, and add them to a digest."""

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dstrain.errors import StateError

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 8
"""Bytes of which a header's length is a multiple."""
DTYPES = MappingProxyType({
    "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64", "float32": "F32", "uint32": "U32",
    "int32": "I32", "bfloat16": "BF16", "float16": "F16", "uint16": "U16", "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8", "bool": "BOOL",
})  # fmt: skip
"""torch's names of dtypes -> the format's, in the order in which files have them: the
largest numbers come first, so that all are aligned."""


def laid_out(tensors: "Mapping[str, Tensor]") -> tuple[dict[str, int], int]:
    """Return where the bytes of each tensor start behind the header, in the order of the
    file, and the bytes of all.
    """
    order = list(DTYPES)
    for name, tensor in tensors.items():
        if _dtype(tensor) not in DTYPES:
            raise StateError(name, f"{tensor.dtype} cannot be stored in safetensors")
    starts = {}
    size = 0
    for name in sorted(
        tensors, key=lambda name: (order.index(_dtype(tensors[name])), name)
    ):
        starts[name] = size
        size += _size(tensors[name])
    return starts, size


def _dtype(tensor: "Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _size(tensor: "Tensor") -> int:
    return tensor.numel() * tensor.itemsize


def header_of(
    tensors: "Mapping[str, Tensor]",
    starts: Mapping[str, int],
    metadata: Mapping[str, str],
) -> bytes:
    """Return the beginning of a file: the length of the rest, and that as JSON."""
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    for name, start in starts.items():
        tensor = tensors[name]
        header[name] = {
            "dtype": DTYPES[_dtype(tensor)],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + _size(tensor)],
        }
    return beginning(header)


def beginning(header: Mapping[str, Any]) -> bytes:
    """Return the beginning of a safetensors file: the length of its header, and that."""
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: "Tensor") -> memoryview:
    """Return the bytes of a tensor, on any device and of any strides, in their order."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def started_digest(metadata: Mapping[str, str]) -> Any:
    """Return a digest of the metadata; tensors are then added in the order of names."""
    digest: Any = hashlib.sha256()
    for item in sorted(metadata.items()):
        digest.update(repr(item).encode())
    return digest


def add_named(digest: Any, name: str, tensor: "Tensor") -> None:
    """Add a tensor with its name to a digest."""
    digest.update(f"{name!r} {tensor.dtype} {list(tensor.shape)};".encode())
    digest.update(bytes_of(tensor))
