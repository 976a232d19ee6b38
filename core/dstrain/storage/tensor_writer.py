"""Write safetensors files, also of tensors that are divided among processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.storage.files import replacing
from dstrain.storage.safetensors import CHECKSUM
from dstrain.storage.tensor_bytes import (
    add_named,
    bytes_of,
    header_of,
    laid_out,
    started_digest,
)

if TYPE_CHECKING:
    from torch import Tensor


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
    digest = started_digest(metadata)
    header = dict(metadata)
    if checksum:
        header[CHECKSUM] = str(digest.hexdigest())  # as long as the one to come
    starts, size = laid_out(tensors)
    with replacing(path, size) as building, building.open("wb") as file:
        data_start = len(header_of(tensors, starts, header))
        for name in sorted(tensors):
            tensor = whole(tensors[name])
            if checksum:
                add_named(digest, name, tensor)
            file.seek(data_start + starts[name])
            file.write(bytes_of(tensor))
            del tensor  # before the next is put together
        if checksum:
            header[CHECKSUM] = str(digest.hexdigest())
        file.seek(0)
        file.write(header_of(tensors, starts, header))


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
