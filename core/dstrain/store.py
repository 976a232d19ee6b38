"""The feature store: the directory that stage 1 writes and stage 2 reads. Content-addressed, append-only, no pickle.

    store.json                      format and version
    shards/NAME.safetensors         values; the file's own header says which (`dstrain`: JSON)
    shards/NAME.json                sha256 and size of that file, written after it: the commit point of the shard
    plans/IDENTITY.jsonl, .json     rows of one plan, and its record with the identity in words: its commit point
    digests.json                    remembered digests of files

A reader sees only what is recorded and takes no lock. A writer holds the lock of the directory.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dstrain.errors import StateError
from dstrain.files import remove_leftovers, sha256, write_file, write_json, write_tensors
from dstrain.keys import hashed
from dstrain.values import flatten, tensor_names, unflatten

FORMAT = MappingProxyType({"format": "dstrain-features", "version": 1})
SHARD_BYTES = 256 * 2**20
SHARD_SECONDS = 60.0
OPEN_SHARDS = 256


@dataclass
class FeatureStore:
    """A store opened for reading: `where` maps the address of each recorded value to its shard and form."""

    folder: Path
    where: dict[str, tuple[str, Any]] = field(default_factory=dict)
    _open: dict[str, Any] = field(default_factory=dict)
    _verified: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, folder: Path) -> "FeatureStore":
        """Read the headers of all recorded shards; raises StateError if this is no store, or of another version."""
        marker = folder / "store.json"
        if not marker.is_file():
            raise StateError(str(folder), "is no feature store (store.json is missing)",
                             "fill it first: the same command with --task TASK:data_process")  # fmt: skip
        found = read_json(marker)
        if found != FORMAT:
            raise StateError(
                str(marker), f"want {dict(FORMAT)}, have {found}", "this store was written by another version"
            )
        store = cls(folder)
        for record in sorted((folder / "shards").glob("*.json")):
            store._add(record.stem)
        return store

    @classmethod
    def create(cls, folder: Path) -> "FeatureStore":
        """Open a store for writing, made if absent; temporaries of a dead run are removed."""
        (folder / "shards").mkdir(parents=True, exist_ok=True)
        (folder / "plans").mkdir(exist_ok=True)
        for part in (folder, folder / "shards", folder / "plans"):
            remove_leftovers(part)
        if not (folder / "store.json").exists():
            write_json(folder / "store.json", dict(FORMAT))
        for shard in sorted((folder / "shards").glob("*.safetensors")):
            if not shard.with_suffix(".json").exists():
                _record(shard)
        return cls.open(folder)

    def _add(self, shard: str) -> None:
        path = self._path(shard)
        for address, form in read_header(path)["values"].items():
            self.where[address] = (shard, form)

    def _path(self, shard: str) -> Path:
        return self.folder / "shards" / f"{shard}.safetensors"

    def __contains__(self, address: str) -> bool:
        return address in self.where

    def form(self, address: str) -> Any:
        """How a value is stored, with the shapes of its tensors."""
        return self.where[address][1]

    def read(self, address: str) -> Any:
        """Return a stored value, its tensors copies of their own; a shard's digest is checked when it is first used."""
        shard, form = self.where[address]
        file = self._file(shard)
        return unflatten(form, {name: file.get_tensor(name).clone() for name in tensor_names(form)})

    def _file(self, shard: str) -> Any:
        if shard not in self._open:
            self.verify(shard)
            if len(self._open) >= OPEN_SHARDS:
                self._open.pop(next(iter(self._open)))
            self._open[shard] = safe_open(self._path(shard), "pt")
        return self._open[shard]

    def verify(self, shard: str) -> None:
        """Compare a shard with the digest in its record; raises StateError naming both when it is damaged."""
        if shard in self._verified:
            return
        path = self._path(shard)
        want, have = read_json(path.with_suffix(".json"))["sha256"], sha256(path)
        if want != have:
            raise StateError(str(path), f"is damaged: sha256 is {have[:16]}..., its record says {want[:16]}...",
                             "delete it and its .json, then run :data_process again")  # fmt: skip
        self._verified.add(shard)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "where": self.where, "_open": {}, "_verified": set()}

    def write_plan(self, identity: Mapping[str, Any], about: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
        """Commit the rows of a plan under its identity and data set; `about` is recorded beside it."""
        path = self.folder / "plans" / f"{hashed('plan', [identity, about['data set']])}.jsonl"
        sequence = 1 + max((record["sequence"] for _, record in self.plans()), default=0)
        write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        record = {"identity": identity, "about": about, "sequence": sequence, "rows": len(rows), "sha256": sha256(path)}
        write_json(path.with_suffix(".json"), record)

    def plans(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield each recorded plan: the path of its rows and its record."""
        for record in sorted((self.folder / "plans").glob("*.json")):
            yield record.with_suffix(".jsonl"), read_json(record)


@dataclass
class ShardWriter:
    """Collects values and commits them as a shard when there are enough, or after a minute."""

    store: FeatureStore
    about: Mapping[str, str]
    max_bytes: int = SHARD_BYTES
    max_seconds: float = SHARD_SECONDS
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _forms: dict[str, Any] = field(default_factory=dict)
    _bytes: int = 0
    _since: float = field(default_factory=time.monotonic)

    def add(self, address: str, value: Any) -> None:
        """Put a value into the shard in progress, unless it is there or already stored."""
        if address in self.store or address in self._forms:
            return
        tensors: dict[str, Tensor] = {}
        form = flatten(value, tensors, address)
        self._tensors.update(tensors)
        self._forms[address] = form
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._bytes >= self.max_bytes or time.monotonic() - self._since >= self.max_seconds:
            self.flush()

    def flush(self) -> None:
        """Commit the shard in progress: the file, then its record."""
        if self._forms:
            name = hashed("shard", sorted(self._forms))
            header = {"values": self._forms, "about": dict(self.about)}
            path = self.store.folder / "shards" / f"{name}.safetensors"
            write_tensors(path, self._tensors, {"dstrain": json.dumps(header, ensure_ascii=False)})
            _record(path)
            self.store._add(name)
        self._tensors, self._forms, self._bytes, self._since = {}, {}, 0, time.monotonic()


def read_header(path: Path) -> dict[str, Any]:
    """The `dstrain` part of a safetensors file's header; raises StateError if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            header: dict[str, Any] = json.loads((file.metadata() or {})["dstrain"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise StateError(str(path), f"cannot be read: {error}",
                         "delete this shard and its .json and run :data_process again") from error  # fmt: skip
    return header


def read_json(path: Path) -> dict[str, Any]:
    """Read a record; raises StateError if it is not JSON."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StateError(str(path), f"cannot be read: {error}") from error
    return content


def _record(shard: Path) -> None:
    write_json(shard.with_suffix(".json"), {"sha256": sha256(shard), "bytes": shard.stat().st_size})
