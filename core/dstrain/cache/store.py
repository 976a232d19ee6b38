"""The feature store: the directory that stage 1 writes and stage 2 reads.
Content-addressed, append-only, no pickle.

    store.json                   format and version
    shards/NAME.safetensors      values; NAME is the hash of the header's `dstrain` part, which has a hash of each value
    plans/NAME.jsonl             one plan: its record, with a hash of itself and of what follows; then a line per sample
    digests.json                 remembered digests of files

A file is written under a temporary name, synced and renamed: that commits it. A reader
sees only whole files, takes no lock, and checks every byte that it uses. A writer holds
the lock of the directory.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dstrain.errors import StateError
from dstrain.graph.values import deserialize, serialize, tensor_names
from dstrain.storage.files import TEMPORARY, remove_leftovers, write_file, write_json
from dstrain.storage.hashing import hash_json
from dstrain.storage.safetensors import add_tensor, write_tensors

FORMAT = MappingProxyType({"format": "dstrain-features", "version": 1})
SHARD_BYTES = 256 * 2**20
SHARD_SECONDS = 60.0
OPEN_SHARDS = 256
AGAIN = "delete it, then run :data_process again: only what it held is computed anew"


@dataclass(frozen=True)
class Shard:
    """An opened shard: `values` maps addresses to {'form': as `values.flatten` wrote
    it, 'sha256': of its tensors}.
    """

    file: Any
    values: Mapping[str, Any]


@dataclass
class FeatureCache:
    """A store opened for reading: `where` maps the address of each value to its shard."""

    folder: Path
    where: dict[str, str] = field(default_factory=dict)
    _open: dict[str, Shard] = field(default_factory=dict)
    _whole: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, folder: Path) -> "FeatureCache":
        """Read the headers of all shards; raises StateError if this is no store, of
        another version, or damaged.
        """
        marker = folder / "store.json"
        if not marker.is_file():
            raise StateError(
                str(folder),
                "is no feature store (store.json is missing)",
                "fill it first: the same command with --task TASK:data_process",
                "and name the store in both with --feature_cache FOLDER",
            )
        try:
            found = json.loads(marker.read_bytes())
        except (OSError, ValueError) as error:
            raise StateError(str(marker), f"cannot be read: {error}", AGAIN) from error
        if found != FORMAT:
            raise StateError(
                str(marker),
                f"want {dict(FORMAT)}, have {found}",
                "this store was written by another version",
            )
        store = cls(folder)
        for path in _committed(folder / "shards", "*.safetensors"):
            store.where.update(dict.fromkeys(open_shard(path).values, path.stem))
        return store

    @staticmethod
    def create(folder: Path) -> None:
        """Make an empty store if there is none, and remove the temporaries of a dead
        run; the caller holds the lock.
        """
        for part in (folder, folder / "shards", folder / "plans"):
            part.mkdir(parents=True, exist_ok=True)
            remove_leftovers(part)
        if not (folder / "store.json").exists():
            write_json(folder / "store.json", dict(FORMAT))

    def __contains__(self, address: str) -> bool:
        return address in self.where

    def header(self, address: str) -> Any:
        """How a value is stored, with the shapes of its tensors."""
        return self._shard(address).values[address]["form"]

    def read(self, address: str) -> Any:
        """Return a stored value, its tensors copies of their own; its digest is checked
        at the first read.

        Raises StateError if it is damaged or gone.
        """
        shard = self._shard(address)
        header, want = shard.values[address]["form"], shard.values[address]["sha256"]
        try:
            tensors = {
                name: shard.file.get_tensor(name).clone()
                for name in tensor_names(header)
            }
        except SafetensorError as error:
            raise StateError(
                str(self._path(address)), f"is damaged: {error}", AGAIN
            ) from error
        if (
            address not in self._whole
            and (have := tensors_digest(tensors.values())) != want
        ):
            what = f"is damaged: the sha256 of value {address} is {have[:16]}..., not {want[:16]}..."
            raise StateError(str(self._path(address)), what, AGAIN)
        self._whole.add(address)
        return deserialize(header, tensors)

    def _path(self, address: str) -> Path:
        return self.folder / "shards" / f"{self.where[address]}.safetensors"

    def _shard(self, address: str) -> Shard:
        if address not in self.where:
            raise StateError(
                str(self.folder), f"lacks value {address}", "run :data_process again"
            )
        name = self.where[address]
        if name not in self._open:
            if len(self._open) >= OPEN_SHARDS:
                self._open.pop(next(iter(self._open)))
            self._open[name] = open_shard(self._path(address))
        return self._open[name]

    def __getstate__(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "where": self.where,
            "_open": {},
            "_whole": set(),
        }

    def write_plan(
        self, identity: Mapping[str, Any], about: Mapping[str, Any], rows: Iterable[Any]
    ) -> None:
        """Commit the rows of a plan; it replaces one of the same identity and data set.
        `about` is recorded with it.
        """
        lines = b"".join(_line(row) for row in rows)
        record = {
            "identity": identity,
            "about": about,
            "sequence": 1
            + max((record["sequence"] for _, record in self.plans()), default=0),
            "sha256": hashlib.sha256(lines).hexdigest(),
        }
        path = (
            self.folder
            / "plans"
            / f"{hash_json('plan', [identity, about['data set']])}.jsonl"
        )
        write_file(
            path,
            _line({"record": record, "digest": hash_json("record", record)}) + lines,
        )

    def plans(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield the path and the record of each plan; raises StateError for a damaged
        record.
        """
        for path in _committed(self.folder / "plans", "*.jsonl"):
            with path.open("rb") as file:
                yield path, _record(path, file.readline())

    def plan_rows(self, path: Path) -> "Lines":
        """The rows of a plan; raises StateError if they are damaged."""
        head, _, lines = path.read_bytes().partition(b"\n")
        if hashlib.sha256(lines).hexdigest() != _record(path, head)["sha256"]:
            raise StateError(
                str(path),
                "is damaged: the sha256 of its rows is not the recorded one",
                AGAIN,
            )
        return Lines(lines)


class Lines(Sequence[Any]):
    """Lines of JSON, read one by one when asked for: a million rows as objects would
    fill the memory.
    """

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]
        start = int(self.ends[place - 1]) + 1 if place else 0
        return json.loads(self.text[start : int(self.ends[place])])


@dataclass
class ShardWriter:
    """Collects values and commits them as a shard when there are enough, or after a
    minute.
    """

    store: FeatureCache
    about: Mapping[str, str]
    max_bytes: int = SHARD_BYTES
    max_seconds: float = SHARD_SECONDS
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _values: dict[str, Any] = field(default_factory=dict)
    _bytes: int = 0
    _since: float = field(default_factory=time.monotonic)

    def add(self, address: str, value: Any) -> None:
        """Put a value into the shard in progress, unless it is there or already stored."""
        if address in self.store or address in self._values:
            return
        tensors: dict[str, Tensor] = {}
        header = serialize(value, tensors, address)
        self._tensors.update(tensors)
        self._values[address] = {
            "form": header,
            "sha256": tensors_digest(tensors.values()),
        }
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        if (
            self._bytes >= self.max_bytes
            or time.monotonic() - self._since >= self.max_seconds
        ):
            self.flush()

    def flush(self) -> None:
        """Commit the shard in progress."""
        if self._values:
            # Not sort_keys: a record's fields keep their order, and so do its tensors,
            # of which the digest is taken.
            header = {
                "values": dict(sorted(self._values.items())),
                "about": dict(self.about),
            }
            text = json.dumps(header, ensure_ascii=False)
            name = _text_digest(text)
            write_tensors(
                self.store.folder / "shards" / f"{name}.safetensors",
                self._tensors,
                {"dstrain": text},
            )
            self.store.where.update(dict.fromkeys(self._values, name))
        self._tensors, self._values, self._bytes, self._since = (
            {},
            {},
            0,
            time.monotonic(),
        )


def open_shard(path: Path) -> Shard:
    """Open a shard and check its header against its name; raises StateError if it is
    damaged or gone.
    """
    try:
        file: Any = safe_open(path, "pt")
        text: str = (file.metadata() or {})["dstrain"]
    except (SafetensorError, OSError, KeyError) as error:
        raise StateError(
            str(path), f"cannot be read: {error or 'it has no header of ours'}", AGAIN
        ) from error
    if _text_digest(text) != path.stem:
        raise StateError(
            str(path), "is damaged: its name is not the hash of its header", AGAIN
        )
    return Shard(file, json.loads(text)["values"])


def tensors_digest(tensors: Iterable[Tensor]) -> str:
    """The sha256 of tensors' dtypes, shapes and bytes, in their order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        add_tensor(digest, tensor)
    return digest.hexdigest()


def _committed(folder: Path, pattern: str) -> list[Path]:
    return sorted(
        path for path in folder.glob(pattern) if not path.name.startswith(TEMPORARY)
    )


def _text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def _line(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _record(path: Path, line: bytes) -> dict[str, Any]:
    try:
        head = json.loads(line)
        record: dict[str, Any] = head["record"]
        if hash_json("record", record) != head["digest"]:
            raise ValueError("its hash is not the recorded one")
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(
            str(path), f"is damaged: its record: {error}", AGAIN
        ) from error
    return record
