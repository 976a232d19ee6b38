"""Write and read shards: safetensors files, each of which describes its values itself.

The header has, beside the tensors, a table with a row of fixed size for each value, sorted
by address. What values have in common, the layout of their tensors, is there once. All
tensors of a value lie one after another, so that a row says where they are.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from dstrain.cache.addresses import ADDRESS, HASH
from dstrain.errors import CacheError, SystemFault, UsageError
from dstrain.graph import serialize
from dstrain.storage import check_writable, replacing
from dstrain.storage.columns import NO_FILE
from dstrain.storage.tensor_bytes import DTYPES, beginning, bytes_of

FOLDER = "shards"
"""The folder of a cache's shards."""
SUFFIX = ".safetensors"
FACTS = "dstrain"
"""The header's entry with what the values have in common, as JSON."""
TABLE = "dstrain.values"
"""The header's entry with the rows of the table, in base64."""
DIGEST = np.dtype((np.void, 16))
"""An xxh3_128 in an array."""
ROW = np.dtype(
    [
        ("address", ADDRESS),
        ("offset", "<i8"),  # from the end of the header, in bytes
        ("length", "<i8"),
        ("layout", "<i4"),  # its number in the facts
        ("digest", DIGEST),
    ]
)
ALIGNMENT = 8
"""Bytes of the largest numbers that tensors have."""
AGAIN = "delete it, then fill the cache again: only the values it contained are computed again"


@dataclass(frozen=True)
class StoredValue:
    """A value in the form in which it is written."""

    layout: str
    """JSON: the value's header, and name, dtype and shape of each tensor in order."""
    tensors: Sequence[Tensor]
    digest: bytes

    @classmethod
    def of(cls, value: Any, address: str) -> "StoredValue":
        """Return the stored form of a value; raises UsageError naming the address if there
        is none. Tensors are copied only where their bytes do not lie in order in RAM, or
        are a part of something larger, which would stay there until they are written.
        """
        named: dict[str, Tensor] = {}
        try:
            # Without the address most values have a layout in common with others.
            header = serialize(value, named, "")
        except UsageError as error:
            error.where = f"{address}{error.where}"
            raise
        # Largest numbers first: then all of them are aligned if the first is.
        ordered = sorted(named.items(), key=lambda item: -item[1].itemsize)
        tensors = {name: _alone(tensor) for name, tensor in ordered}
        entries = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in tensors.items()
        ]
        layout = _json({"header": header, "tensors": entries})
        digest = xxhash.xxh3_128(layout.encode())
        for tensor in tensors.values():
            digest.update(bytes_of(tensor))
        return cls(layout, list(tensors.values()), digest.digest())

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def alignment(self) -> int:
        """Return what the place of its first tensor must be a multiple of."""
        return max((tensor.itemsize for tensor in self.tensors), default=1)


@dataclass(frozen=True)
class Shard:
    """What a shard says of itself."""

    name: str
    about: Mapping[str, str]
    """What it records of the run that wrote it."""
    layouts: Sequence[str]
    rows: NDArray[Any]
    """An array of dtype ROW, sorted by address."""


def shard_path(folder: Path, name: str) -> Path:
    """Return the path of a shard of a cache."""
    return folder / FOLDER / f"{name}{SUFFIX}"


def shard_paths(folder: Path) -> list[Path]:
    """Return the shards of a cache."""
    return sorted(folder.glob(f"{FOLDER}/[!.]*{SUFFIX}"))


def look_again(folder: Path) -> None:
    """Let the system look again for shards that other machines have written: a file that
    is written in a folder makes it do so.
    """
    check_writable(folder / FOLDER)


def write_shard(
    folder: Path, values: Mapping[str, StoredValue], about: Mapping[str, str]
) -> Shard:
    """Commit values, by address, as a shard of a cache; raises SystemFault.

    Equal values give equal bytes.
    """
    addresses = sorted(values)
    layouts = list(dict.fromkeys(values[address].layout for address in addresses))
    number_of = {layout: number for number, layout in enumerate(layouts)}
    # By address within a group: first what keeps the place of the next aligned, last
    # what needs no alignment.
    order = sorted(
        range(len(addresses)),
        key=lambda number: _place_in_file(values[addresses[number]]),
    )
    rows = np.zeros(len(addresses), ROW)
    entries: dict[str, Any] = {}
    pieces: list[Tensor | bytes] = []
    end = 0

    def put(name: str, dtype: str, shape: list[int], piece: Any, size: int) -> None:
        nonlocal end
        entries[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [end, end + size],
        }
        pieces.append(piece)
        end += size

    for number in order:
        value = values[addresses[number]]
        if gap := -end % value.alignment:
            # safetensors has no gaps between tensors.
            put(f"padding/{end}", "U8", [gap], bytes(gap), gap)
        start = end
        names = json.loads(value.layout)["tensors"]
        for (name, dtype, shape), tensor in zip(names, value.tensors, strict=True):
            put(f"{number}{name}", DTYPES[dtype], shape, tensor, tensor.nbytes)
        layout = number_of[value.layout]
        address = bytes.fromhex(addresses[number])
        rows[number] = (address, start, end - start, layout, value.digest)
    facts = {"about": dict(about), "layouts": layouts}
    metadata = {FACTS: _json(facts), TABLE: base64.b64encode(rows.tobytes()).decode()}
    head = beginning({"__metadata__": metadata, **entries})
    name = _digest(head)
    with (
        replacing(shard_path(folder, name), len(head) + end) as building,
        building.open("wb") as file,
    ):
        file.write(head)
        for piece in pieces:
            file.write(piece if isinstance(piece, bytes) else bytes_of(piece))
    return Shard(name, dict(about), layouts, rows)


def read_shard(path: Path) -> Shard:
    """Return what a shard says of itself, verified by its name; its values are not read.

    Raises StateError if it is damaged or missing, SystemFault if it cannot be read.
    """
    head = _head(path)
    try:
        metadata = json.loads(head[8:]).get("__metadata__", {})
        facts = json.loads(metadata[FACTS])
        rows = np.frombuffer(base64.b64decode(metadata[TABLE], validate=True), ROW)
        layouts = facts["layouts"]
        places = np.stack([rows["offset"], rows["length"], rows["layout"]])
        if rows.size and (places.min() < 0 or rows["layout"].max() >= len(layouts)):
            raise ValueError("its table has numbers that cannot be")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(path, f"cannot be read: {error}", advice(path)) from error
    _check_name(path, head)
    return Shard(path.stem, facts["about"], layouts, rows)


def data_start(path: Path) -> int:
    """Verify the header of a shard by its name; return where it ends.

    Raises StateError if it is damaged or missing, SystemFault if it cannot be read.
    """
    head = _head(path)
    _check_name(path, head)
    return len(head)


def advice(path: Path) -> str:
    """Return what to do about a damaged file of a cache; only what stage 1 named may be
    deleted.
    """
    if HASH.fullmatch(path.stem):
        return AGAIN
    return "move it away: stage 1 makes no file of this name"


def _head(path: Path) -> bytes:
    """Return the beginning of a shard, up to its tensors."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = file.read(8)
            rest = int.from_bytes(length, "little")
            if 8 + rest > size:
                raise ValueError("its header is longer than the file")
            return length + file.read(rest)
    except (*NO_FILE, ValueError) as error:
        raise CacheError(path, f"cannot be read: {error}", advice(path)) from error
    except OSError as error:
        raise SystemFault(path, f"cannot be read: {error.strerror}") from error


def _check_name(path: Path, head: bytes) -> None:
    if _digest(head) != path.stem:
        what = "is damaged: its name is not the hash of its header"
        raise CacheError(path, what, advice(path))


def _alone(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.clone()
    return tensor


def _place_in_file(value: StoredValue) -> int:
    if value.alignment == 1:
        return 2
    return 1 if value.nbytes % ALIGNMENT else 0


def _json(content: Any) -> str:
    # Not sort_keys: a record's fields keep their order.
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _digest(head: bytes) -> str:
    return hashlib.blake2b(head, digest_size=20).hexdigest()
