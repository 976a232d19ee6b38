"""Read safetensors files, and verify those that have a checksum in the header."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.errors import StateError
from dstrain.storage.files import REPLACES_OPEN_FILES
from dstrain.storage.tensor_bytes import add_named, started_digest

if TYPE_CHECKING:
    from torch import Tensor

CHECKSUM = "dstrain.sha256"
"""The header's entry that holds the digest of everything else in the file."""


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
    with opened(path, "np") as file:
        return tuple(
            (name, tuple(file.get_slice(name).get_shape()))
            for name in sorted(file.keys())
        )


def read_rows(
    path: Path, rows: Callable[[str, list[int]], slice | None]
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
            what = f"is damaged or not saved by dstrain: its header has no {CHECKSUM!r}"
            raise StateError(path, what)
        tensors = ((name, file.get_tensor(name)) for name in sorted(file.keys()))
        _verify(path, tensors, metadata)
    return metadata


@contextmanager
def opened(path: Path, framework: str = "pt") -> Iterator[Any]:
    """Open a safetensors file; what cannot be read in it becomes StateError. Only as "np" may
    a file be larger than memory: it is not mapped writable, and its header is enough.
    """
    from safetensors import safe_open

    # The library would wait for a pipe to be written.
    if path.exists() and not path.is_file():
        raise StateError(path, "is not a regular file")
    with naming_faults(path), safe_open(path, framework) as file:
        yield file


@contextmanager
def naming_faults(path: Path) -> Iterator[None]:
    """Turn what cannot be read in a safetensors file into a StateError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StateError(path, f"cannot be read as safetensors: {error}") from error


def _verify(
    path: Path, tensors: "Iterable[tuple[str, Tensor]]", metadata: Mapping[str, str]
) -> None:
    """Raise StateError if the metadata has a checksum that the content does not match."""
    rest = dict(metadata)
    recorded = rest.pop(CHECKSUM, None)
    if recorded is None:
        return
    digest = started_digest(rest)
    for name, tensor in tensors:
        add_named(digest, name, tensor)
    if digest.hexdigest() != recorded:
        what = "is damaged: the sha256 of its content is not the one in its header"
        advice = (
            "if another program changed it and kept the header, save it there again"
        )
        raise StateError(path, what, advice)
