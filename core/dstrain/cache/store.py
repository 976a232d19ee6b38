"""Write and read the feature cache: stage 1 fills the folder, stage 2 reads it.

    store.json                   format and version
    shards/NAME.safetensors      values; NAME is the hash of the header, which has a hash of each value
    plans/NAME.jsonl             one plan: its record, with a hash of itself and of what follows; then a line per sample
    digests.json                 remembered digests of files

It is content-addressed and append-only. A file is written under a temporary name, synced
and renamed: that commits it. A reader sees only complete files, takes no lock, and checks
every byte that it uses. A writer holds the lock of the folder.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dstrain.errors import CacheError, StateError
from dstrain.graph.values import deserialize, serialize, tensor_names
from dstrain.storage.files import (
    refuse_link,
    remove_leftovers,
    write_file,
    write_json,
)
from dstrain.storage.hashing import hash_json
from dstrain.storage.safetensors import add_tensor, write_tensors

MARKER = "store.json"
DIGESTS = "digests.json"
LOG = "dstrain.log"
PARTS = (MARKER, "shards", "plans", DIGESTS, LOG)
HASH = re.compile(r"[0-9a-f]{40}")
"""Names of shards and plans, without what follows the dot."""
FORMAT = MappingProxyType({"format": "dstrain-features", "version": 2})
OPEN_SHARDS = 256
"""Most shards open at once: each one has an open file and mapped memory."""
Values = Mapping[str, Any]
"""Address -> {'header': the value's header, 'sha256': the digest of its tensors}."""
AGAIN = "delete it, then fill the cache again: only the values it contained are computed again"


@dataclass
class FeatureCache:
    """A feature cache that is open for reading."""

    folder: Path
    where: dict[str, str] = field(default_factory=dict)
    """Address of each value -> the name of its shard."""
    _open: dict[str, tuple[Any, Values]] = field(default_factory=dict)
    _verified: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, folder: Path) -> "FeatureCache":
        """Read the headers of all shards.

        Raises StateError if this is not a cache, has another version, or is damaged.
        """
        if not (folder / MARKER).is_file():
            what = f"is not a feature cache: {MARKER} not found"
            raise CacheError(
                folder, what, "name the folder that stage 1 filled with --feature_cache"
            )
        check_parts(folder)
        cache = cls(folder)
        for path in _named(folder / "shards", ".safetensors"):
            _, values = open_shard(path)
            cache.where |= dict.fromkeys(values, path.stem)
        return cache

    @staticmethod
    def create(folder: Path) -> None:
        """Create an empty cache if there is none, and remove temporary files of a dead
        run; the caller holds the lock, and has called `check_parts`.
        """
        for part in (folder, folder / "shards", folder / "plans"):
            part.mkdir(parents=True, exist_ok=True)
            remove_leftovers(part)
        if not (folder / MARKER).exists():
            write_json(folder / MARKER, dict(FORMAT))

    def __contains__(self, address: str) -> bool:
        return address in self.where

    def header(self, address: str) -> Any:
        """Return the header of a value, which has the shapes of its tensors."""
        _, record = self._stored(address)
        return record["header"]

    def read(self, address: str) -> Any:
        """Return a value, its tensors copies of their own.

        Its digest is verified at the first read. Raises StateError if it is damaged or
        missing.
        """
        file, record = self._stored(address)
        path = self._path(self.where[address])
        header = record["header"]
        tensors = {}
        try:
            for name in tensor_names(header):
                # A tensor of an open file is mapped memory, which ends with the file.
                tensors[name] = file.get_tensor(name).clone()
        except SafetensorError as error:
            raise CacheError(path, f"is damaged: {error}", AGAIN) from error
        if address not in self._verified:
            if tensors_digest(tensors.values()) != record["sha256"]:
                what = (
                    f"is damaged: the sha256 of value {address} is not the recorded one"
                )
                raise CacheError(path, what, AGAIN)
            self._verified.add(address)
        return deserialize(header, tensors)

    def _path(self, shard: str) -> Path:
        return self.folder / "shards" / f"{shard}.safetensors"

    def _stored(self, address: str) -> tuple[Any, Any]:
        """Return the open shard of a value, and its entry in the shard's header."""
        if address not in self.where:
            what = f"lacks value {address}"
            raise CacheError(self.folder, what)
        name = self.where[address]
        if name not in self._open:
            if len(self._open) >= OPEN_SHARDS:
                self._open.pop(next(iter(self._open)))
            self._open[name] = open_shard(self._path(name))
        file, values = self._open[name]
        return file, values[address]

    def __getstate__(self) -> dict[str, Any]:
        # Loader processes open the files themselves.
        return {**vars(self), "_open": {}, "_verified": set()}

    def write_plan(
        self,
        identity: Mapping[str, Any],
        about: Mapping[str, Any],
        rows: Iterable[Any],
    ) -> None:
        """Commit a plan; it replaces one of the same identity and dataset.

        Args:
            identity: What the plan's values depend on.
            about: Recorded with it; its entry 'dataset' identifies the dataset.
            rows: JSON data, one per sample.
        """
        lines = b"".join(_line(row) for row in rows)
        sequences = [record["sequence"] for _, record in self.plans()]
        record = {
            "identity": identity,
            "about": about,
            "sequence": 1 + max(sequences, default=0),
            "sha256": hashlib.sha256(lines).hexdigest(),
        }
        head = {"record": record, "digest": hash_json("record", record)}
        name = hash_json("plan", [identity, about["dataset"]])
        write_file(self.folder / "plans" / f"{name}.jsonl", _line(head) + lines)

    def plans(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield the path and the record of each plan.

        Raises StateError for a damaged record.
        """
        for path in _named(self.folder / "plans", ".jsonl"):
            with path.open("rb") as file:
                yield path, _record(path, file.readline())

    def plan_rows(self, path: Path) -> "Lines":
        """Return the rows of a plan; raises StateError if they are damaged."""
        head, _, lines = path.read_bytes().partition(b"\n")
        if hashlib.sha256(lines).hexdigest() != _record(path, head)["sha256"]:
            what = "is damaged: the sha256 of its rows is not the recorded one"
            raise CacheError(path, what, AGAIN)
        return Lines(lines)


def check_parts(folder: Path) -> None:
    """Check the parts that a cache has before it is read, or written to.

    Raises StateError for a link, which would lead outside of the cache, and for a marker
    that is damaged, of another version, or of something else.
    """
    for name in PARTS:
        refuse_link(folder / name)
    marker = folder / MARKER
    if not marker.exists():
        return
    try:
        found = json.loads(marker.read_bytes())
    except (OSError, ValueError) as error:
        raise CacheError(marker, f"cannot be read: {error}", AGAIN) from error
    if found == FORMAT:
        return
    version = found.get("version") if isinstance(found, dict) else None
    if type(version) is not int or found != {**FORMAT, "version": version}:
        what = f"expected {dict(FORMAT)}, found {found}"
        raise StateError(
            marker,
            what,
            "another program wrote it, or it is damaged: give another --feature_cache",
        )
    raise StateError(
        marker,
        f"is that of a feature cache of format {version}, "
        f"and this version of dstrain has format {FORMAT['version']}",
        "it is left as it is; fill a new one by running the same command with"
        " --task TASK:data_process --feature_cache NEW_FOLDER",
        "and train with --feature_cache NEW_FOLDER",
    )


def _named(folder: Path, suffix: str) -> list[Path]:
    """Return the files of a cache in a folder; raises StateError for a link."""
    paths = sorted(folder.glob(f"[!.]*{suffix}"))
    for path in paths:
        refuse_link(path)
    return paths


def _again(path: Path) -> str:
    """Return what to do about a damaged shard or plan; only what stage 1
    named may be deleted."""
    if HASH.fullmatch(path.stem):
        return AGAIN
    return "move it away: stage 1 makes no file of this name"


class Lines(Sequence[Any]):
    """Lines of JSON, each parsed when it is used.

    A million rows as objects would fill the memory.
    """

    def __init__(self, text: bytes) -> None:
        self.lines = text.splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: Any) -> Any:
        return json.loads(self.lines[index])


@dataclass
class ShardWriter:
    """A writer that collects values and commits a shard when it is large or old enough."""

    cache: FeatureCache
    about: Mapping[str, str]
    """Recorded in each shard."""
    max_bytes: int = 256 * 2**20
    max_seconds: float = 60.0
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _values: dict[str, Any] = field(default_factory=dict)
    _bytes: int = 0
    _since: float = field(default_factory=time.monotonic)

    def add(self, address: str, value: Any) -> None:
        """Add a value to the shard in progress, unless it is there or already stored."""
        if address in self.cache or address in self._values:
            return
        tensors: dict[str, Tensor] = {}
        header = serialize(value, tensors, address)
        digest = tensors_digest(tensors.values())
        self._tensors |= tensors
        self._values[address] = {"header": header, "sha256": digest}
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        age = time.monotonic() - self._since
        if self._bytes >= self.max_bytes or age >= self.max_seconds:
            self.flush()

    def flush(self) -> None:
        """Commit the shard in progress."""
        if self._values:
            # Not sort_keys: a record's fields keep their order, and so do its tensors,
            # over which the digest is computed.
            values = dict(sorted(self._values.items()))
            header = {"values": values, "about": dict(self.about)}
            text = json.dumps(header, ensure_ascii=False)
            name = _text_digest(text)
            path = self.cache.folder / "shards" / f"{name}.safetensors"
            write_tensors(path, self._tensors, {"dstrain": text})
            self.cache.where |= dict.fromkeys(self._values, name)
        self._tensors = {}
        self._values = {}
        self._bytes = 0
        self._since = time.monotonic()


def open_shard(path: Path) -> tuple[Any, Values]:
    """Open a shard and verify its header by its name; return the file and its values.

    Raises StateError if it is damaged or missing.
    """
    try:
        file: Any = safe_open(path, "pt")
        text: str = (file.metadata() or {})["dstrain"]
    except (SafetensorError, OSError, KeyError) as error:
        raise CacheError(path, f"cannot be read: {error}", _again(path)) from error
    if _text_digest(text) != path.stem:
        what = "is damaged: its name is not the hash of its header"
        raise CacheError(path, what, _again(path))
    return file, json.loads(text)["values"]


def tensors_digest(tensors: Iterable[Tensor]) -> str:
    """Return the sha256 of tensors' dtypes, shapes and bytes, in their order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        add_tensor(digest, tensor)
    return digest.hexdigest()


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
        what = f"is damaged: its record: {error}"
        raise CacheError(path, what, _again(path)) from error
    return record
