"""Safetensors files written whole, with a checksum in the header."""

import errno
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.errors import StateError
from dstrain.storage.files import replacing

if TYPE_CHECKING:
    from torch import Tensor


def write_tensors(
    path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]
) -> None:
    """Replace the safetensors file by these tensors and this header; equal content
    gives equal bytes.

    Tensors may lie on any device, be views, or share storage (each name keeps a copy).
    Raises SystemFault.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    apart = _apart(tensors)
    with replacing(path, sum(tensor.nbytes for tensor in apart.values())) as building:
        building.touch()
        mode = building.stat().st_mode & 0o777
        try:
            save_file(
                apart, building, metadata=dict(metadata) or None
            )  # {} and no tensors: a torn header
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error
        building.chmod(
            mode
        )  # save_file leaves 0600, which others who share the folder could not read
        _sort_header(building)


def read_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Return the tensors of a safetensors file, on the CPU, and its metadata.

    Raises StateError if it is unreadable, or if its header has a digest and its content
    is not what was sealed.
    """
    from safetensors import SafetensorError, safe_open

    refuse_folder(path)
    try:
        with safe_open(path, "pt") as file:
            # SIM118: a safetensors file has keys() and is itself not iterable.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise StateError(
            str(path), f"cannot be read as safetensors: {error}"
        ) from error
    verify_checksum(path, tensors, metadata)
    return tensors, metadata


def refuse_folder(path: Path) -> None:
    """Raise StateError for a folder where a file of weights is wanted, naming the
    newest one in it.
    """
    if path.is_dir():
        newest = max(
            path.glob("*.safetensors"),
            key=lambda file: file.stat().st_mtime_ns,
            default=None,
        )
        raise StateError(
            str(path),
            "is a folder",
            *([f"its newest weights file: {newest}"] if newest else []),
        )


def _apart(tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """The tensors on the CPU, contiguous, no two in one storage (safetensors refuses
    that).
    """
    import torch

    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
        apart[name] = (
            plain.clone(memory_format=torch.contiguous_format)
            if place in seen
            else plain
        )
        seen.add(place)
    return apart


def _sort_header(path: Path) -> None:
    """Sort the metadata in a safetensors header in place: the library writes it in an
    order that differs by process.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        if "__metadata__" in header:
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            ordered = (
                json.dumps(header, ensure_ascii=False, separators=(",", ":"))
                .encode()
                .ljust(length)
            )
            if len(ordered) == length:  # the same characters in another order
                file.seek(8)
                file.write(ordered)


CHECKSUM = "dstrain.sha256"
"""The header's entry that holds the digest of everything else in the file."""


def with_checksum(
    tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]
) -> dict[str, str]:
    """The metadata with the digest of itself and of these tensors: names, dtypes,
    shapes and bytes.
    """
    return {**metadata, CHECKSUM: _digest(sorted(tensors.items()), metadata)}


def verify_checksum(
    path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]
) -> None:
    """Raise StateError if the metadata holds a digest and it is not that of the file's
    content.
    """
    _compare(path, sorted(tensors.items()), metadata)


def verify_file(path: Path) -> dict[str, str]:
    """Read a weights file of ours, tensor by tensor, and return its metadata; raises
    StateError if it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            if CHECKSUM not in metadata:
                raise StateError(
                    str(path),
                    f"has no {CHECKSUM!r} in its header: it is damaged, or was not saved by dstrain",
                )
            _compare(
                path,
                ((name, file.get_tensor(name)) for name in sorted(file.keys())),
                metadata,
            )
    except (OSError, SafetensorError) as error:
        raise StateError(
            str(path), f"cannot be read as safetensors: {error}"
        ) from error
    return metadata


def _compare(
    path: Path, tensors: "Iterable[tuple[str, Tensor]]", metadata: Mapping[str, str]
) -> None:
    recorded = metadata.get(CHECKSUM)
    if recorded is None:
        return
    rest = {name: value for name, value in metadata.items() if name != CHECKSUM}
    if _digest(tensors, rest) != recorded:
        what = "is damaged: the sha256 of its content is not the one in its header"
        raise StateError(
            str(path),
            what,
            "or another program changed it and kept the header: save it anew with that",
        )


def _digest(
    tensors: "Iterable[tuple[str, Tensor]]", metadata: Mapping[str, str]
) -> str:
    digest: Any = hashlib.sha256()
    for item in sorted(metadata.items()):
        digest.update(repr(item).encode())
    for name, tensor in tensors:
        digest.update(f"{name!r} ".encode())
        add_tensor(digest, tensor)
    return str(digest.hexdigest())


def add_tensor(digest: Any, tensor: "Tensor") -> None:
    """Add a tensor's dtype, shape and bytes to a hashlib digest."""
    import torch

    digest.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
    digest.update(
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    )
