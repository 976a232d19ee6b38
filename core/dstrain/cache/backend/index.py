"""The folder of a feature cache, and its index: where each value is.

    store.json                   format and version
    shards/NAME.safetensors      values: see `shards`
    index/NAME.arrow             the index
    plans/                       see `plan_files`
    digests.npy                  remembered digests of files
    long_prompts-RANK.jsonl      what is known of values that are of long prompts
    dstrain.log                  the log of stage 1

The index is derived from shards, which describe themselves: columns sorted by address. On
disk it is an Arrow file that is named by the hash of its bytes, and mapped into memory; one
that is missing, damaged or made for other shards is not used, and is made again.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dstrain.cache.addresses import ADDRESS, HASH, Addresses, in_order, prefixes
from dstrain.cache.backend import plan_files, shards as shard_files
from dstrain.cache.backend.shards import AGAIN, DIGEST, Shard
from dstrain.errors import CacheError, StateError, SystemFault
from dstrain.storage import Digests, remove_leftovers, write_columns, write_json
from dstrain.storage.columns import SUFFIX, open_columns
from dstrain.storage.file_memory import is_own, is_whole
from dstrain.storage.files import refuse_link
from dstrain.storage.temporaries import temporaries

MARKER = "store.json"
DIGESTS = "digests.npy"
LOG = "dstrain.log"
NOTES = "long_prompts-*.jsonl"
FOLDER = "index"
FOLDERS = (shard_files.FOLDER, FOLDER, plan_files.FOLDER)
PARTS = (MARKER, *FOLDERS, DIGESTS, LOG)
EXPORTED = (shard_files.FOLDER, plan_files.FOLDER)
"""The folders that an export has."""
PART = re.compile(
    r"store\.json|shards/[0-9a-f]{40}\.safetensors"
    r"|plans/[0-9a-f]{40}\.json|plans/[0-9a-f]{32}\.arrow"
)
"""The names of files that an export has."""
FORMAT = MappingProxyType({"format": "dstrain-features", "version": 3})
SHARDS = b"shards"
"""The entry of the file's metadata with the names of the shards, as JSON."""
OWN = re.compile(r"([0-9a-f]{32}|draft)\.arrow")
"""Files of an index, those included that a run left which died while it wrote one."""


@dataclass(frozen=True)
class Index:
    """The values of some shards, each value once."""

    shards: tuple[str, ...]
    """The shards it covers; one whose values others have too has no value here."""
    layouts: Any
    """A `pyarrow.LargeStringArray`: what values have in common, as `StoredValue` has it."""
    addresses: Addresses
    """Sorted; the other columns are in the same order."""
    shard: NDArray[np.int32]
    """The number of its shard."""
    offset: NDArray[np.int64]
    """Where its tensors begin, from the end of the shard's header."""
    length: NDArray[np.int64]
    """The bytes of its tensors."""
    layout: NDArray[np.int32]
    digest: NDArray[np.void]

    @classmethod
    def of(cls, shard: Shard) -> "Index":
        """Return the index of one shard."""
        import pyarrow as pa

        rows = shard.rows
        columns = [np.ascontiguousarray(rows[name]) for name in rows.dtype.names or ()]
        addresses, offset, length, layout, digest = columns
        return cls(
            (shard.name,),
            pa.array(shard.layouts, pa.large_string()),
            addresses,
            np.zeros(len(rows), np.int32),
            offset,
            length,
            layout,
            digest,
        )

    @classmethod
    def merged(cls, parts: "Sequence[Index]") -> "Index":
        """Return an index of all shards of several; of values that are there twice the first
        is used.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        shards: list[str] = []
        shard_numbers = [np.zeros(0, np.int32)]
        for part in parts:
            shard_numbers.append(part.shard + np.int32(len(shards)))
            shards += part.shards
        all_layouts = pa.chunked_array(
            [part.layouts for part in parts], pa.large_string()
        )
        layouts = all_layouts.unique()
        layout_numbers = [np.zeros(0, np.int32)]
        for part in parts:
            numbers = pc.index_in(part.layouts, layouts).to_numpy(zero_copy_only=False)
            layout_numbers.append(numbers.astype(np.int32)[part.layout])

        def joined(name: str, dtype: Any) -> NDArray[Any]:
            columns = [np.zeros(0, dtype), *(getattr(part, name) for part in parts)]
            return np.concatenate(columns)

        everything = cls(
            tuple(shards),
            layouts,
            joined("addresses", ADDRESS),
            np.concatenate(shard_numbers),
            joined("offset", np.int64),
            joined("length", np.int64),
            np.concatenate(layout_numbers),
            joined("digest", DIGEST),
        )
        return everything.chosen(in_order(everything.addresses))

    @classmethod
    def read(cls, folder: Path, shards: Collection[str]) -> "Index | None":
        """Return the index of a cache whose shards are all still there, mapped into memory;
        None if there is none, or it is damaged.

        shards: The names of the shards there are.
        """
        # Values are only added while older ones are kept: the largest covers most.
        for path in sorted(own_files(folder), key=lambda path: -path.stat().st_size):
            with suppress(StateError, SystemFault):
                table = open_columns(path)
                covered = tuple(json.loads(table.schema.metadata[SHARDS]))
                if set(covered) <= set(shards):
                    return cls._of_table(table, covered)
        return None

    @classmethod
    def _of_table(cls, table: Any, shards: tuple[str, ...]) -> "Index":
        if not len(table):
            # A table without rows has no batch.
            return replace(cls.merged([]), shards=shards)
        (batch,) = table.to_batches()

        def fixed(name: str, dtype: Any) -> NDArray[Any]:
            column = batch.column(name)
            data = np.frombuffer(column.buffers()[1], dtype)
            return data[column.offset : column.offset + len(column)]

        layout = batch.column("layout")
        return cls(
            shards,
            layout.dictionary,
            fixed("address", ADDRESS),
            batch.column("shard").to_numpy(),
            batch.column("offset").to_numpy(),
            batch.column("length").to_numpy(),
            layout.indices.to_numpy(),
            fixed("digest", DIGEST),
        )

    @cached_property
    def prefixes(self) -> NDArray[np.uint64]:
        """The beginnings of the addresses, which are searched."""
        return prefixes(self.addresses)

    def __len__(self) -> int:
        return len(self.addresses)

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in vars(self).items() if name != "prefixes"}

    def chosen(self, rows: NDArray[Any]) -> "Index":
        """Return an index with only some of the rows, by number or by condition."""
        columns = ("addresses", "shard", "offset", "length", "layout", "digest")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def write(self, folder: Path, is_read: bool, is_there: bool) -> None:
        """Commit the index of a cache, unless `is_there`, then remove older ones; the caller
        holds the lock. Raises SystemFault.

        While another process reads the cache, `is_read`, the old ones stay until the next
        is written: on a network file system a file that one machine removes is gone for
        another that has it mapped.
        """
        import pyarrow as pa

        if is_there and (is_read or len(own_files(folder)) == 1):
            return

        def fixed(column: NDArray[np.void]) -> Any:
            width = column.dtype.itemsize
            data = pa.py_buffer(np.ascontiguousarray(column))
            return pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(width), len(column), [None, data]
            )

        columns = {
            "address": fixed(self.addresses),
            "shard": pa.array(self.shard),
            "offset": pa.array(self.offset),
            "length": pa.array(self.length),
            "layout": pa.DictionaryArray.from_arrays(
                pa.array(self.layout), self.layouts
            ),
            "digest": fixed(self.digest),
        }
        batch = pa.record_batch(columns)
        schema = batch.schema.with_metadata({SHARDS: json.dumps(self.shards)})
        # One batch: each column is one piece of the file, and so one array when it is read.
        described = batch.replace_schema_metadata(schema.metadata)
        name = write_columns(folder / FOLDER, schema, [described])
        for path in own_files(folder):
            if path.name != f"{name}{SUFFIX}" and not is_read:
                path.unlink(missing_ok=True)


def own_files(folder: Path) -> list[Path]:
    """Return the files of an index in a cache."""
    paths = sorted((folder / FOLDER).glob("*"))
    return [one for one in paths if OWN.fullmatch(one.name) and not one.is_symlink()]


def is_cache(folder: Path) -> bool:
    """Return whether a folder has the marker of a feature cache."""
    return (folder / MARKER).is_file()


def others_in(folder: Path) -> list[str]:
    """Return what is no part of a cache in a folder that is none; raises as `create_cache`."""
    _check_parts(folder)
    names = set(os.listdir(folder)) if folder.is_dir() else set()
    # Without a marker, too: the advice for a damaged one is to delete it.
    if MARKER in names or names >= {shard_files.FOLDER, plan_files.FOLDER, LOG}:
        return []
    # Those of a first start that was killed, and of an empty file system; dstrain's own
    # locks, and what file managers leave, begin with a dot.
    ours = {*FOLDERS, "lost+found"}
    return sorted(one for one in names - ours if not one.startswith("."))


def digests_of_files(folder: Path) -> Digests:
    """Open the digests of a dataset's files that a cache remembers."""
    return Digests(folder / DIGESTS)


def check_is_cache(folder: Path) -> None:
    """Raise StateError if a folder is no feature cache, has another version, or parts that
    are refused.
    """
    if not is_cache(folder):
        why = f"{MARKER} not found" if folder.exists() else "it does not exist"
        advice = "name the folder that stage 1 filled with --feature_cache"
        raise CacheError(folder, f"is not a feature cache: {why}", advice)
    _check_parts(folder)


def _check_parts(folder: Path) -> None:
    """Check the parts that a cache has before it is read, or written to.

    Raises StateError for a link, which would lead outside of the cache, for a marker
    that is damaged, of another version, or of something else, and for a folder whose
    name torch cannot be told.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        advice = "give the folder another name, or another --feature_cache"
        raise StateError(folder, "has a name that is not UTF-8 text", advice) from error
    for name in PARTS:
        refuse_link(folder / name)
    marker = folder / MARKER
    if not marker.exists():
        return
    try:
        found = json.loads(marker.read_bytes())
    except OSError as error:
        raise SystemFault(marker, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CacheError(marker, f"cannot be read: {error}", AGAIN) from error
    if found != FORMAT:
        raise StateError(
            marker,
            f"is that of another format, {found}; this version of dstrain has {dict(FORMAT)}",
            "it is left as it is; fill a new one by running the same command with"
            " --task TASK:data_process --feature_cache NEW_FOLDER",
            "and train with --feature_cache NEW_FOLDER",
        )


def create_cache(folder: Path) -> None:
    """Create an empty cache if there is none, and remove temporary files of a dead run; the
    caller holds the lock. Raises StateError for a part that is refused.
    """
    _check_parts(folder)
    make_folders(folder)
    remove_leftovers(folder)
    if not (folder / MARKER).exists():
        write_json(folder / MARKER, dict(FORMAT))


def make_folders(folder: Path) -> None:
    """Make the folders of a cache that it lacks, and remove temporary files from them."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder / name)


def parts_in(folder: Path) -> list[Path]:
    """Return the marker of a cache, and what is in the folders that an export has."""
    parts = [folder / MARKER]
    for name in EXPORTED:
        parts += sorted((folder / name).glob("[!.]*"))
    return parts


def temporary_files(folder: Path) -> list[Path]:
    """Return what runs that died have left in a cache under temporary names."""
    return [path for part in ("", *FOLDERS) for path in temporaries(folder / part)]


def damaged_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the damaged files that are made from others, which are not used then, and why."""
    for path in own_files(folder):
        try:
            open_columns(path)
        except StateError as error:
            # One that a run left which died is a temporary file, and stage 1 replaces the
            # index whenever it adds values.
            if path.stem != "draft" and path.exists():
                yield path, error.what
    path = folder / DIGESTS
    if path.is_file() and not is_whole(path):
        what = "is damaged" if is_own(path) else "is nothing that stage 1 writes"
        yield path, f"{what}, and is not used"


def may_be_ours(path: Path) -> bool:
    """Return whether stage 1 may have written a file of a cache that is damaged now."""
    if path.name == DIGESTS:
        return is_own(path)
    # Only those of an index that have the names of one are looked at.
    return path.parent.name == FOLDER or HASH.fullmatch(path.stem) is not None


def note_value(folder: Path, writer: int, line: str) -> None:
    """Add a line of JSON about a value that this process is about to store."""
    with (folder / NOTES.replace("*", str(writer))).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def noted_values(folder: Path) -> Iterator[str]:
    """Yield the lines about values; one may be cut short, whose value is not stored."""
    for path in sorted(folder.glob(NOTES)):
        yield from path.read_text(encoding="utf-8").splitlines()
