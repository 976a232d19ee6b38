"""Write and read the plans of a feature cache: which samples there are, where the values of
each are, and which files they were computed from.

    plans/NAME.json    the record of a plan, with a hash of itself; it names its columns
    plans/HASH.arrow   columns: samples, source files or frame folders

The record is written last: that commits a plan. A million samples are arrays here, not
objects.
"""

import json
import os
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dstrain.cache.addresses import (
    ADDRESS,
    BYTES,
    HASH,
    Addresses,
    Numbers,
    as_text,
    packed,
    prefixes,
)
from dstrain.cache.backend.shards import AGAIN
from dstrain.cache.plan_records import CacheInfo, check_record
from dstrain.errors import CacheError, StateError, SystemFault
from dstrain.storage import hash_json, write_columns, write_file
from dstrain.storage.columns import BATCH_ROWS, NO_FILE, SUFFIX, open_columns
from dstrain.storage.files import refuse_link
from dstrain.storage.hashing import KEY_BYTES, FileMark
from dstrain.storage.lazy_sequences import Lazy
from dstrain.storage.spool import Spool

FOLDER = "plans"
"""The folder of a cache's plans."""
RECORD = ".json"
COLUMNS = re.compile(r"[0-9a-f]{32}")
"""Names of column files, without what follows the dot."""
FILES = MappingProxyType(
    {
        "columns": dict.fromkeys(("files", "folders", "samples"), COLUMNS),
        "sequence": int,
    }
)
"""What a record has about the files of its plan; see `plan_records`."""
NUMBERS = ("row", "line", "chunk", "inputs", "group", "weight")
"""Facts of a variant of a sample that are numbers."""
NOTHING = bytes(BYTES)
"""Stands for the address of a value that a sample does not have."""
NO_LITERAL = -1
AT = "at "
"""Begins the name of a column of addresses."""
LITERAL = "literal "
"""Begins the name of a column of values that the plan contains itself, as JSON."""
OLDER_ROWS = "previews"
"""The name of `prompt_rows` in plans of earlier versions, which are still read."""


@dataclass(frozen=True)
class PlanSamples(Lazy[Mapping[str, Any]]):
    """The samples of a plan; one by number is a line of the plan as it was written."""

    numbers: Mapping[str, Numbers]
    """A column of each of `NUMBERS`."""
    stored: Mapping[str, Addresses]
    """Value -> its address in each sample, zeros in one that does not have it."""
    codes: Mapping[str, NDArray[np.int32]]
    """Value -> its number in `literals` in each sample, or NO_LITERAL."""
    literals: Mapping[str, Sequence[Any]]
    """Value -> what it is in samples, as `values.serialize` wrote it, each once."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.numbers["row"])

    def one(self, number: int) -> Mapping[str, Any]:
        """Return a sample's numbers and `values`: each {'at': address} or the value."""
        values: dict[str, Any] = {}
        for name, addresses in self.stored.items():
            address = as_text(addresses[number])
            if address != NOTHING.hex():
                values[name] = {"at": address}
        for name, codes in self.codes.items():
            if codes[number] != NO_LITERAL:
                values[name] = self.literals[name][codes[number]]
        facts = {name: int(column[number]) for name, column in self.numbers.items()}
        return {**facts, "values": values}

    @property
    def names(self) -> list[str]:
        """Return the names of all values."""
        return list({**self.codes, **self.stored})

    @property
    def sample_ids(self) -> Numbers:
        """Return the row and chunk of each sample, (samples, 2)."""
        return np.stack([self.numbers["row"], self.numbers["chunk"]], axis=1)

    def index(self, row: int, chunk: int = 0) -> int:  # type: ignore[override]  # by another key
        """Return the number of the sample of a row and chunk."""
        rows = self.numbers["row"]
        first = int(rows.searchsorted(row))
        if not chunk:
            return first
        last = int(rows.searchsorted(row, "right"))
        return first + int(self.numbers["chunk"][first:last].searchsorted(chunk))

    def has(self, name: str) -> NDArray[np.bool_]:
        """Return which samples have a stored value."""
        column: NDArray[np.bool_] = self.stored[name] != np.void(NOTHING)
        return column

    def using(self, addresses: Collection[str]) -> Iterator[tuple[int, str]]:
        """Yield row and address wherever a sample uses one of these, by samples."""
        wanted = packed(one for one in addresses if HASH.fullmatch(one))
        numbers: list[NDArray[np.int64]] = []
        found: list[Addresses] = []
        for column in self.stored.values():
            is_one = np.isin(prefixes(column), prefixes(wanted))
            numbers.append(np.flatnonzero(is_one))
            found.append(column[is_one])
        if not numbers:
            return
        order = np.argsort(np.concatenate(numbers), kind="stable")
        rows = self.numbers["row"][np.concatenate(numbers)[order]]
        for row, address in zip(
            rows.tolist(), np.concatenate(found)[order], strict=True
        ):
            if (text := as_text(address)) in addresses:
                yield row, text

    @property
    def values_digest(self) -> str:
        """Return a digest of all values, in the order of the samples."""
        digest = blake2b(digest_size=KEY_BYTES)
        for name, column in sorted(self.stored.items()):
            digest.update(f"{name}\n".encode())
            digest.update(column.tobytes())
        for name, codes in sorted(self.codes.items()):
            digest.update(hash_json(name, self.literals[name]).encode())
            digest.update(codes.tobytes())
        return digest.hexdigest()

    @property
    def digest(self) -> str:
        """Return a digest of all that training depends on: all but places in files."""
        digest = blake2b(self.values_digest.encode(), digest_size=KEY_BYTES)
        for name in NUMBERS:
            if name != "line":
                digest.update(self.numbers[name].tobytes())
        return digest.hexdigest()


@dataclass
class _Samples:
    """Samples that are collected for a plan."""

    count: int
    numbers: dict[str, "array[int]"]
    stored: dict[str, bytearray]
    codes: dict[str, "array[int]"]
    texts: dict[str, dict[str, int]]

    def add(self, line: Mapping[str, Any]) -> None:
        for name, column in self.numbers.items():
            column.append(line[name])
        for name, form in line["values"].items():
            if "at" in form:
                addresses = self.stored.setdefault(name, bytearray())
                addresses += NOTHING * (self.count - len(addresses) // BYTES)
                addresses += bytes.fromhex(form["at"])
            else:
                codes = self.codes.setdefault(name, array("i"))
                codes.extend([NO_LITERAL] * (self.count - len(codes)))
                texts = self.texts.setdefault(name, {})
                text = json.dumps(form, ensure_ascii=False)
                codes.append(texts.setdefault(text, len(texts)))
        self.count += 1

    def write(self, folder: Path) -> str:
        import pyarrow as pa

        columns: dict[str, Any] = {}
        for name, numbers in self.numbers.items():
            columns[name] = pa.array(np.frombuffer(numbers, np.int64))
        for name, addresses in sorted(self.stored.items()):
            addresses += NOTHING * (self.count - len(addresses) // BYTES)
            present = np.frombuffer(addresses, ADDRESS) != np.void(NOTHING)
            buffers = [pa.array(present).buffers()[1], pa.py_buffer(addresses)]
            kind = pa.binary(BYTES)
            columns[AT + name] = pa.Array.from_buffers(kind, self.count, buffers)
        for name, codes in sorted(self.codes.items()):
            codes.extend([NO_LITERAL] * (self.count - len(codes)))
            indices = np.frombuffer(codes, np.int32)
            texts = pa.array(list(self.texts[name]), pa.string())
            columns[LITERAL + name] = pa.DictionaryArray.from_arrays(
                pa.array(indices, mask=indices == NO_LITERAL), texts
            )
        # One batch: each column is one piece of the file, and so one array when it is
        # mapped.
        batch = pa.record_batch(columns)
        return write_columns(folder, batch.schema, [batch])


@dataclass(frozen=True)
class FileRows:
    """The files that the values of a plan were computed from, read in slices."""

    table: Any
    """A `pyarrow.Table` over mapped memory."""

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.table)

    def part(self, start: int, count: int) -> "FileRows":
        """Return some of the files."""
        return FileRows(self.table.slice(start, count))

    def of_samples(self, samples: range) -> "FileRows":
        """Return the files that are recorded with these samples."""
        return FileRows(_of_samples(self.table, samples))

    @property
    def marks(self) -> list[tuple[bytes, FileMark]]:
        """Return the name of each file in one of the folders of the dataset, and its recorded
        mark, as `file_mark` has it.
        """
        names = ("place", "size", "modified", "changed", "inode")
        columns = (self.table[name].to_pylist() for name in names)
        return [(name, mark) for name, *mark in zip(*columns, strict=True)]

    def digest(self, number: int) -> bytes:
        """Return the sha256 of a file."""
        digest: bytes = self.table["sha256"][number].as_py()
        return digest


def _of_samples(table: Any, samples: range) -> Any:
    """Return the lines of a table, in the order of their samples, that are of these."""
    numbers = table.column("sample").to_numpy()
    start, stop = numbers.searchsorted([samples.start, samples.stop]).tolist()
    return table.slice(start, stop - start)


class StoredPlan(NamedTuple):
    """A plan of a cache."""

    path: Path
    """The file that commits it; without it, `remove_unused` removes its columns."""
    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return its name, which another one of its identity and dataset has too."""
        return self.path.stem

    @property
    def identity(self) -> Mapping[str, Any]:
        """Return what its values depend on."""
        identity: Mapping[str, Any] = self.record["identity"]
        return identity

    @property
    def info(self) -> CacheInfo:
        """Return what it records of the run that made it."""
        return CacheInfo(**self.record["about"])

    @property
    def use(self) -> str:
        """Return what its samples are used for; '' for those that are trained on."""
        return str(self.identity.get("use", ""))

    @property
    def sequence(self) -> int:
        """Return a number that a newer plan of the cache has a larger one of."""
        return int(self.record["sequence"])

    @property
    def prompt_addresses(self) -> list[str]:
        """Return the addresses of the values of the rows that plugins added."""
        rows = self.info.prompt_rows
        forms = [form for row in rows for form in row["values"].values()]
        return [form["at"] for form in forms if "at" in form]

    @property
    def parts(self) -> list[Path]:
        """Return its files; the last one commits it."""
        names = sorted(set(self.record["columns"].values()))
        return [*(self.path.with_name(f"{name}{SUFFIX}") for name in names), self.path]

    def validate(self) -> None:
        """Read all of its columns; raises as `columns` does, and what Arrow raises."""
        for which in self.record["columns"]:
            self.columns(which).validate(full=True)

    def columns(self, which: str) -> Any:
        """Return the columns that are named `which`, a `pyarrow.Table`; raises StateError
        if they are damaged or missing, SystemFault if they cannot be read.
        """
        path = self._part(which)
        refuse_link(path)
        try:
            return open_columns(path)
        except StateError as error:
            raise CacheError(path, error.what, AGAIN) from error

    def samples(self) -> PlanSamples:
        """Return its samples; raises StateError if they are damaged or missing, or nothing
        that stage 1 writes, and SystemFault if they cannot be read.
        """
        table = self.columns("samples")
        try:
            samples = _samples_of(table)
            _check_codes(samples.numbers["inputs"], len(self.record["about"]["inputs"]))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            what = f"is nothing that stage 1 writes: {error}"
            raise CacheError(self._part("samples"), what, AGAIN) from error
        return samples

    def files(self) -> FileRows:
        """Return the files that its values were computed from; raises as `columns` does."""
        return FileRows(self.columns("files"))

    def frame_folders(self, samples: range) -> Iterator[tuple[str, str]]:
        """Yield the frame folders that are recorded with some samples, each with the digest
        of its names; raises as `columns` does.
        """
        table = _of_samples(self.columns("folders"), samples)
        for batch in table.to_batches():
            places = batch.column("place").to_pylist()
            digests = batch.column("names").to_pylist()
            for place, names in zip(places, digests, strict=True):
                yield os.fsdecode(place), names.hex()

    def _part(self, which: str) -> Path:
        return self.path.with_name(f"{self.record['columns'][which]}{SUFFIX}")


def write_plan(
    folder: Path,
    identity: Mapping[str, Any],
    about: Mapping[str, Any],
    lines: Iterable[Mapping[str, Any]],
) -> None:
    """Commit a plan of a cache; it replaces one of the same identity and dataset. The
    caller holds the lock.

    Args:
        identity: What the plan's values depend on.
        about: Recorded with it; its entry 'dataset' identifies the dataset.
        lines: One per sample: the numbers of `NUMBERS`; `values`, each {'at': address}
            or as `values.serialize` wrote it; `files` that no line before it has, each
            with its mark and sha256; `frame folders`, each with a digest.
    """
    import pyarrow as pa

    samples = _Samples(0, {name: array("q") for name in NUMBERS}, {}, {}, {})
    file_schema = pa.schema(
        {
            "place": pa.binary(),
            **dict.fromkeys(("size", "modified", "changed"), pa.int64()),
            "inode": pa.uint64(),
            "sha256": pa.binary(32),
            "sample": pa.int64(),
        }
    )
    folder_schema = pa.schema(
        {"place": pa.binary(), "names": pa.binary(KEY_BYTES), "sample": pa.int64()}
    )
    # Frame folders wait on disk while the files of the same lines are written.
    folders = Spool()

    def file_rows() -> Iterator[tuple[Any, ...]]:
        for number, line in enumerate(lines):
            samples.add(line)
            for place, (*mark, sha256) in line["files"]:
                yield os.fsencode(place), *mark, bytes.fromhex(sha256), number
            for place, names in line["frame folders"]:
                folders.append((place, names, number))

    def folder_rows() -> Iterator[tuple[Any, ...]]:
        for place, names, number in folders:
            yield os.fsencode(place), bytes.fromhex(names), number

    plans = folder / FOLDER
    columns = {
        "files": write_columns(plans, file_schema, _batches(file_schema, file_rows())),
        "folders": write_columns(
            plans, folder_schema, _batches(folder_schema, folder_rows())
        ),
        "samples": samples.write(plans),
    }
    record = {"identity": identity, "about": about, "columns": columns}
    commit_plans(folder, [record])


def _batches(schema: Any, rows: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
    """Yield rows as `pyarrow.RecordBatch` of no more than BATCH_ROWS, at least one."""
    import pyarrow as pa

    while True:
        part = list(islice(rows, BATCH_ROWS))
        columns = [list(column) for column in zip(*part, strict=True)]
        yield pa.record_batch(columns or [[] for _ in schema], schema=schema)
        if len(part) < BATCH_ROWS:
            return


def commit_plans(folder: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write the records of plans whose columns are in the cache already, as its newest
    ones in this order; the caller holds the lock.
    """
    newest = max((plan.sequence for plan in stored_plans(folder)), default=0)
    for sequence, record in enumerate(records, newest + 1):
        name = plan_name(record)
        numbered = {**record, "sequence": sequence}
        head = {"record": numbered, "digest": hash_json("record", numbered)}
        text = json.dumps(head, ensure_ascii=False)
        write_file(folder / FOLDER / f"{name}{RECORD}", text.encode() + b"\n")
    remove_unused(folder)


def plan_name(record: Mapping[str, Any]) -> str:
    """Return the name of a plan, which another one of its identity and dataset has too."""
    return hash_json("plan", [record["identity"], record["about"]["dataset"]])


def plan_paths(folder: Path) -> list[Path]:
    """Return the files that commit the plans of a cache."""
    return sorted(folder.glob(f"{FOLDER}/[!.]*{RECORD}"))


def stored_plans(folder: Path) -> list[StoredPlan]:
    """Return the plans of a cache.

    Raises StateError for a damaged record, and for a link; SystemFault if one cannot be
    read.
    """
    plans = []
    for path in plan_paths(folder):
        refuse_link(path)
        plans.append(StoredPlan(path, read_record(path)))
    return plans


def remove_unused(folder: Path) -> None:
    """Remove the columns of plans that were not committed; the caller holds the lock."""
    for path in unused_columns(folder):
        path.unlink()


def unused_columns(folder: Path) -> list[Path]:
    """Return the files of plans that were not committed."""
    named = {path for plan in stored_plans(folder) for path in plan.parts}
    return [
        path
        for path in folder.glob(f"{FOLDER}/[!.]*{SUFFIX}")
        if path not in named and (COLUMNS.fullmatch(path.stem) or path.stem == "draft")
    ]


def _samples_of(table: Any) -> PlanSamples:
    """Return the samples in a table; raises ValueError, and what numpy and Arrow raise,
    for one that `_Samples` does not write.
    """
    import pyarrow as pa

    numbers = {}
    for name in NUMBERS:
        column = table.column(name)
        if column.type != pa.int64() or column.null_count:
            raise ValueError(f"column {name} has other than numbers")
        numbers[name] = column.to_numpy()
    stored: dict[str, Addresses] = {}
    codes: dict[str, NDArray[np.int32]] = {}
    literals: dict[str, Sequence[Any]] = {}
    for title in table.column_names:
        column = table.column(title)
        if title.startswith(AT):
            if column.type != pa.binary(BYTES):
                raise ValueError(f"column {title!r} has other than addresses")
            stored[title.removeprefix(AT)] = fixed_column(column, ADDRESS)
        elif title.startswith(LITERAL):
            name = title.removeprefix(LITERAL)
            chunks = column.chunks
            parts = [one.indices.fill_null(NO_LITERAL).to_numpy() for one in chunks]
            codes[name] = np.concatenate([np.empty(0, np.int32), *parts])
            texts = chunks[0].dictionary.to_pylist()
            literals[name] = [json.loads(text) for text in texts]
            _check_codes(codes[name], len(texts), NO_LITERAL)
    return PlanSamples(numbers, stored, codes, literals)


def _check_codes(codes: NDArray[Any], count: int, least: int = 0) -> None:
    """Raise ValueError for a number that is none of a list of so many."""
    if len(codes) and not (least <= codes.min() and codes.max() < count):
        raise ValueError("it has numbers of what is not there")


def fixed_column(column: Any, dtype: np.dtype[Any]) -> Any:
    """Return a column of values of one length as an array, zeros where there is none."""
    # What lies where there is no value is up to who wrote it: here it was zeros.
    parts = [
        np.frombuffer(chunk.buffers()[1], dtype)[
            chunk.offset : chunk.offset + len(chunk)
        ]
        for chunk in column.chunks
        if len(chunk)
    ]
    if not parts:
        return np.empty(0, dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of a plan, with all that `plan_records` asks for.

    Raises StateError if it is damaged or missing, or nothing that stage 1 writes, and
    SystemFault if it cannot be read.
    """
    try:
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            raise ValueError("it is cut short")
        head = json.loads(content)
        record: dict[str, Any] = head["record"]
        if hash_json("record", record) != head["digest"]:
            raise ValueError("its hash is not the recorded one")
        if OLDER_ROWS in record["about"]:
            record["about"]["prompt_rows"] = record["about"].pop(OLDER_ROWS)
        check_record(record, FILES)
    except (*NO_FILE, ValueError, KeyError, TypeError, RecursionError) as error:
        known = HASH.fullmatch(path.stem)
        advice = AGAIN if known else "move it away: stage 1 makes no file of this name"
        what = f"is damaged: its record: {error}"
        raise CacheError(path, what, advice) from error
    except OSError as error:
        raise SystemFault(path, f"cannot be read: {error.strerror}") from error
    return record
