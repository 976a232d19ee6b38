"""A digest in the header of a weights file: safetensors files carry none, and most flipped bits would load silently."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.errors import StateError

if TYPE_CHECKING:
    from torch import Tensor

SEAL = "dstrain.sha256"
"""The header's entry that holds the digest of everything else in the file."""


def sealed(tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata with the digest of itself and of these tensors: names, dtypes, shapes and bytes."""
    return {**metadata, SEAL: _digest(sorted(tensors.items()), metadata)}


def check_seal(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> None:
    """Raise StateError if the metadata holds a digest and it is not that of the file's content."""
    _compare(path, sorted(tensors.items()), metadata)


def check_file(path: Path) -> dict[str, str]:
    """Read a weights file of ours, tensor by tensor, and return its metadata; raises StateError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            if SEAL not in metadata:
                raise StateError(
                    str(path), f"has no {SEAL!r} in its header: it is damaged, or was not saved by dstrain"
                )
            _compare(path, ((name, file.get_tensor(name)) for name in sorted(file.keys())), metadata)
    except (OSError, SafetensorError) as error:
        raise StateError(str(path), f"cannot be read as safetensors: {error}") from error
    return metadata


def _compare(path: Path, tensors: "Iterable[tuple[str, Tensor]]", metadata: Mapping[str, str]) -> None:
    recorded = metadata.get(SEAL)
    if recorded is None:
        return
    rest = {name: value for name, value in metadata.items() if name != SEAL}
    if _digest(tensors, rest) != recorded:
        what = "is damaged: the sha256 of its content is not the one in its header"
        raise StateError(str(path), what, "or another program changed it and kept the header: save it anew with that")


def _digest(tensors: "Iterable[tuple[str, Tensor]]", metadata: Mapping[str, str]) -> str:
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
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
