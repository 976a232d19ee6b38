"""Read and write safetensors files with a checksum in the header."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dstrain.errors import StateError
from dstrain.storage.files import REPLACES_OPEN_FILES, replacing

if TYPE_CHECKING:
    from torch import Tensor

CHECKSUM = "dstrain.sha256"
"""The header's entry that holds the digest of everything else in the file."""
ALIGNMENT = 8
"""Bytes of which a header's length is a multiple."""


def write_tensors(
    path: Path,
    tensors: "Mapping[str, Tensor]",
    metadata: Mapping[str, str],
    checksum: bool = False,
) -> None:
    """Replace the safetensors file by these tensors and this header.

    Equal content gives equal bytes, those of the library. Tensors may lie on any device,
    be views, or share storage (each name keeps a copy). One after another is brought to
    the CPU and written. With `checksum` the header gets the digest
    of itself and of names, dtypes, shapes and bytes.

    Tensors of which each process has some rows are put together one by one: meanwhile
    every other process calls `take_part` with the same names. Raises SystemFault, and
    StateError for a tensor of a dtype that such files do not have.
    """
    digest = _started(metadata)
    header = dict(metadata)
    if checksum:
        header[CHECKSUM] = str(digest.hexdigest())  # as long as the one to come
    starts, size = _laid_out(tensors)
    with replacing(path, size) as building, building.open("wb") as file:
        data_start = len(_header(tensors, starts, header))
        for name in sorted(tensors):
            tensor = whole(tensors[name])
            if checksum:
                _add_named(digest, name, tensor)
            file.seek(data_start + starts[name])
            file.write(bytes_of(tensor))
            del tensor  # before the next is put together
        if checksum:
            header[CHECKSUM] = str(digest.hexdigest())
        file.seek(0)
        file.write(_header(tensors, starts, header))


def take_part(tensors: "Mapping[str, Tensor]") -> None:
    """Give this process's rows of each tensor to the process that is in `write_tensors`."""
    for name in sorted(tensors):
        whole(tensors[name])


def is_divided(value: object) -> bool:
    """Return whether a value is a tensor of which each process has some rows."""
    return hasattr(value, "full_tensor")


def whole(tensor: "Tensor") -> "Tensor":
    """Return a tensor, put together if each process has some of its rows: then every
    process must call this, in the same order.
    """
    if not is_divided(tensor):
        return tensor
    # Rows that are kept in RAM are exchanged by the devices.
    moved: Any = tensor.detach().to(tensor.device_mesh.device_type)  # type: ignore[attr-defined]  # of a DTensor
    together: Tensor = moved.full_tensor()
    return together


def read_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Return the tensors of a safetensors file, on the CPU, and its metadata.

    Raises StateError if it is unreadable, or does not match the checksum in its header.
    """
    with opened(path) as file:
        names = file.keys()
        tensors = {name: _released(file.get_tensor(name)) for name in names}
        metadata = dict(file.metadata() or {})
    _verify(path, sorted(tensors.items()), metadata)
    return tensors, metadata


def tensor_shapes(path: Path) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the names and shapes of the tensors of a safetensors file, from its header.

    Raises StateError if it is unreadable.
    """
    with opened(path) as file:
        names = sorted(file.keys())
        return tuple((name, tuple(file.get_slice(name).get_shape())) for name in names)


def read_rows(
    path: Path,
    rows: Callable[[str, list[int]], slice | None],
) -> "dict[str, Tensor]":
    """Return the tensors of a safetensors file without a checksum, on the CPU: of each,
    by its name and shape, some rows or, for None, all.

    Raises StateError if it is unreadable.
    """
    tensors = {}
    with opened(path) as file:
        names = file.keys()
        for name in names:
            part = file.get_slice(name)
            wanted = rows(name, part.get_shape())
            tensor = file.get_tensor(name) if wanted is None else part[wanted]
            tensors[name] = _released(tensor)
    return tensors


def _released(tensor: "Tensor") -> "Tensor":
    """Return a tensor that leaves its file unmapped where a mapped one could not be
    replaced or removed: a resumed run removes the state that it began with.
    """
    return tensor if REPLACES_OPEN_FILES else tensor.clone()


def verify_file(path: Path) -> dict[str, str]:
    """Verify a weights file that dstrain saved, tensor by tensor; return its metadata.

    Raises StateError if it is damaged or has no checksum.
    """
    with opened(path) as file:
        metadata = dict(file.metadata() or {})
        if CHECKSUM not in metadata:
            raise StateError(
                path,
                f"has no {CHECKSUM!r} in its header: it is damaged, or was not saved by dstrain",
            )
        names = sorted(file.keys())
        _verify(path, ((name, file.get_tensor(name)) for name in names), metadata)
    return metadata


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; what cannot be read in it becomes StateError."""
    from safetensors import safe_open

    # The library would wait for a pipe to be written.
    if path.exists() and not path.is_file():
        raise StateError(path, "is not a regular file")
    with naming_faults(path), safe_open(path, "pt") as file:
        yield file


@contextmanager
def naming_faults(path: Path) -> Iterator[None]:
    """Turn what cannot be read in a safetensors file into a StateError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StateError(path, f"cannot be read as safetensors: {error}") from error


DTYPES = MappingProxyType({
    "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64", "float32": "F32", "uint32": "U32",
    "int32": "I32", "bfloat16": "BF16", "float16": "F16", "uint16": "U16", "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8", "bool": "BOOL",
})  # fmt: skip
"""torch's names of dtypes -> the format's, in the order in which files have them: the
largest numbers come first, so that all are aligned."""


def _laid_out(tensors: "Mapping[str, Tensor]") -> tuple[dict[str, int], int]:
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


def _header(
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


def _verify(
    path: Path,
    tensors: "Iterable[tuple[str, Tensor]]",
    metadata: Mapping[str, str],
) -> None:
    """Raise StateError if the metadata has a checksum that the content does not match."""
    rest = dict(metadata)
    recorded = rest.pop(CHECKSUM, None)
    if recorded is None:
        return
    digest = _started(rest)
    for name, tensor in tensors:
        _add_named(digest, name, tensor)
    if digest.hexdigest() != recorded:
        raise StateError(
            path,
            "is damaged: the sha256 of its content is not the one in its header",
            "or another program changed it but kept the header: save it again with that program",
        )


def _started(metadata: Mapping[str, str]) -> Any:
    """Return a digest of the metadata, to which tensors are added in the order of their
    names.
    """
    digest: Any = hashlib.sha256()
    for item in sorted(metadata.items()):
        digest.update(repr(item).encode())
    return digest


def _add_named(digest: Any, name: str, tensor: "Tensor") -> None:
    digest.update(f"{name!r} {tensor.dtype} {list(tensor.shape)};".encode())
    digest.update(bytes_of(tensor))
