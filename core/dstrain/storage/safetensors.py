"""Read and write safetensors files with a checksum in the header."""

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.errors import StateError
from dstrain.storage.files import replacing

if TYPE_CHECKING:
    from torch import Tensor

CHECKSUM = "dstrain.sha256"
"""The header's entry that holds the digest of everything else in the file."""


def write_tensors(
    path: Path,
    tensors: "Mapping[str, Tensor]",
    metadata: Mapping[str, str],
) -> None:
    """Replace the safetensors file by these tensors and this header.

    Equal content gives equal bytes. Tensors may lie on any device, be views, or share
    storage (each name keeps a copy). Raises SystemFault.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    separate = _separate(tensors)
    size = sum(tensor.nbytes for tensor in separate.values())
    with replacing(path, size) as building:
        building.touch()
        mode = building.stat().st_mode & 0o777
        try:
            # With {} as metadata and no tensors the library writes a broken header.
            save_file(separate, building, metadata=dict(metadata) or None)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error
        # save_file leaves 0600, which others who share the folder could not read.
        building.chmod(mode)
        _sort_header(building)


def read_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Return the tensors of a safetensors file, on the CPU, and its metadata.

    Raises StateError if it is unreadable, or does not match the checksum in its header.
    """
    with opened(path) as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
        metadata = dict(file.metadata() or {})
    _verify(path, sorted(tensors.items()), metadata)
    return tensors, metadata


def with_checksum(
    tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]
) -> dict[str, str]:
    """Return the metadata with the digest of itself and of these tensors.

    The digest covers names, dtypes, shapes and bytes.
    """
    return {**metadata, CHECKSUM: _digest(sorted(tensors.items()), metadata)}


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


def add_tensor(digest: Any, tensor: "Tensor") -> None:
    """Add a tensor's dtype, shape and bytes to a hashlib digest."""
    import torch

    digest.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; what cannot be read in it becomes StateError."""
    from safetensors import SafetensorError, safe_open

    # The library would wait for a pipe to be written.
    if path.exists() and not path.is_file():
        raise StateError(path, "is not a regular file")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise StateError(path, f"cannot be read as safetensors: {error}") from error


def _separate(tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Return the tensors on the CPU, contiguous, no two in one storage.

    The library refuses tensors that share a storage.
    """
    import torch

    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        if storage in seen:
            plain = plain.clone(memory_format=torch.contiguous_format)
        separate[name] = plain
        seen.add(storage)
    return separate


def _sort_header(path: Path) -> None:
    """Sort the metadata in a safetensors header in place.

    The library writes it in an order that differs from process to process.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        if "__metadata__" not in header:
            return
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
        ordered = text.encode().ljust(length)
        # The same characters in another order; anything else would move the tensors.
        if len(ordered) == length:
            file.seek(8)
            file.write(ordered)


def _verify(
    path: Path,
    tensors: "Iterable[tuple[str, Tensor]]",
    metadata: Mapping[str, str],
) -> None:
    """Raise StateError if the metadata has a checksum that the content does not match."""
    rest = dict(metadata)
    recorded = rest.pop(CHECKSUM, None)
    if recorded is not None and _digest(tensors, rest) != recorded:
        raise StateError(
            path,
            "is damaged: the sha256 of its content is not the one in its header",
            "or another program changed it but kept the header: save it again with that program",
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
