"""`dstrain cache verify`: read every byte of a feature cache, and name what is damaged."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.cache import (
    ABSENT,
    ADDRESS,
    DIGESTS,
    Addresses,
    FeatureCache,
    PlanSamples,
    check_is_cache,
    find,
    open_samples,
    packed,
    prefixes,
    read_record,
)
from dstrain.cache.addresses import in_order
from dstrain.cache.in_use import reading
from dstrain.cache.index import own_files
from dstrain.cache.plan_files import open_part
from dstrain.cache.plan_records import literal
from dstrain.console import number_of, printable, progress_bar, redacted, shell_command
from dstrain.errors import CacheError, StateError, SystemFault
from dstrain.runs.cache_commands.contents import preview_addresses
from dstrain.storage.columns import open_columns
from dstrain.storage.file_memory import is_own, is_whole


@dataclass(frozen=True)
class Problem:
    """A file of a cache that is damaged, or that names values which the cache lacks."""

    path: Path
    what: str


Repair = Callable[[Sequence[Problem]], None]


@dataclass(frozen=True)
class Verified:
    """What was read of a cache."""

    shards: int
    values: int
    plans: int
    problems: tuple[Problem, ...]


def verify(folder: Path, repair: Repair | None = None) -> None:
    """Read every byte of a cache and print what was found.

    repair: Given what is wrong, removes it; then all is read again.

    Raises StateError if something is damaged in the end.
    """
    found = report(folder)
    if found.problems and repair is not None:
        repair(found.problems)
        found = report(folder)
    if found.problems:
        files = len({problem.path for problem in found.problems})
        what = f"{files} of its files are damaged or incomplete"
        advice = []
        if repair is None:
            words = ["dstrain", "cache", "verify", str(folder), "--repair"]
            advice = [f"to repair it, run: {shell_command(words)}"]
        raise StateError(folder, what, *advice)


def report(folder: Path) -> Verified:
    """Read every byte of a cache, print what was found, and return it.

    Nothing can be removed from the cache meanwhile. Raises StateError while another
    process removes something.
    """
    check_is_cache(folder)
    with reading(folder):
        found = verified(folder)
    for problem in found.problems:
        print(printable(redacted(f"{problem.path}: {problem.what}")))
    print(
        f"{folder}: read {number_of(f'{found.values:,}', 'value')} "
        f"in {number_of(f'{found.shards:,}', 'shard')},"
        f" and {number_of(f'{found.plans:,}', 'plan')}"
    )
    return found


def verified(folder: Path) -> Verified:
    """Read every byte of a cache; what is damaged is part of the result.

    Raises StateError if this is no cache, or one of another version; SystemFault if a
    file cannot be read, of which nothing is known then.
    """
    check_is_cache(folder)
    shards = _files(folder / "shards", ".safetensors")
    plans = _files(folder / "plans", ".json")
    problems: list[Problem] = []
    present = bytearray()
    with closing(progress_bar("verify", len(shards) + len(plans))) as progress:
        for path in shards:
            for item in _shard(folder, path):
                if isinstance(item, Problem):
                    problems.append(item)
                else:
                    present += bytes.fromhex(item)
            progress.update()
        found = np.frombuffer(bytes(present), ADDRESS)
        known = found[in_order(found)]
        for path in plans:
            problems += plan_problems(path, known)
            progress.update()
    problems += derived_problems(folder)
    return Verified(len(shards), len(known), len(plans), tuple(problems))


def _files(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"[!.]*{suffix}"))


def shard_problem(folder: Path, path: Path) -> Problem | None:
    """Return what is wrong with a shard, None if it is whole."""
    found = (one for one in _shard(folder, path) if isinstance(one, Problem))
    return next(found, None)


def whole_values(folder: Path, path: Path) -> list[str] | None:
    """Return the addresses of the values of a damaged shard that are whole; None if all
    of the shard is.
    """
    found = list(_shard(folder, path))
    values = [one for one in found if isinstance(one, str)]
    return values if len(values) < len(found) else None


def readable_record(path: Path) -> dict[str, Any] | None:
    """Return the record of a plan; None if it is damaged."""
    try:
        return read_record(path)
    except CacheError:
        return None


def _shard(folder: Path, path: Path) -> Iterator[str | Problem]:
    """Yield the address of each value of a shard that is whole, and what is wrong."""
    try:
        # Each shard has a reader of its own, so that no more than one is open.
        cache = FeatureCache.of_shards(folder, [path])
    except Exception as error:
        yield _problem(path, error)
        return
    for address in cache:
        try:
            cache.read(address)
        except Exception as error:
            yield _problem(path, error)
        else:
            yield address


def derived_problems(folder: Path) -> Iterator[Problem]:
    """Yield what is wrong with files of a cache that are made from the others: they are
    not used then, so that opening the cache, or filling it, takes longer.
    """
    for path in own_files(folder / "index"):
        try:
            open_columns(path)
        except StateError as error:
            # One that a run left which died is a temporary file, and stage 1 replaces the
            # index whenever it adds values.
            if path.stem != "draft" and path.exists():
                yield Problem(path, error.what)
    path = folder / DIGESTS
    if path.is_file() and not is_whole(path):
        what = "is damaged" if is_own(path) else "is nothing that stage 1 writes"
        yield Problem(path, f"{what}, and is not used")


def plan_problems(path: Path, known: Addresses) -> Iterator[Problem]:
    """Yield what is wrong with a plan, where the values at these addresses are present,
    sorted.
    """
    first = prefixes(known)
    try:
        record = read_record(path)
        for part in record["columns"]:
            # What a stranger wrote may lead out of its own columns.
            open_part(path.parent, record, part).validate(full=True)
        rows = open_samples(path.parent, record)
        lacking = np.zeros(len(rows), np.bool_)
        for name, addresses in rows.stored.items():
            numbers = find(addresses, known, first)
            lacking |= rows.has(name) & (numbers == ABSENT)
        missing = int(lacking.sum())
        previews = packed(preview_addresses(record["about"]["previews"]))
        _check_literals(rows)
    except StateError as error:
        what = "" if error.where == str(path) else f"{Path(error.where).name} "
        yield Problem(path, what + error.what)
        return
    except Exception as error:
        yield _problem(path, error)
        return
    if missing:
        what = f"needs values that are not here or damaged, for {missing:,} of {len(rows):,} samples"
        yield Problem(path, what)
    if (find(previews, known, first) == ABSENT).any():
        yield Problem(path, "needs values of previews that are not here or damaged")


def _check_literals(rows: PlanSamples) -> None:
    """Raise ValueError for a value in a plan itself that is none."""
    for name, forms in rows.literals.items():
        for form in forms:
            for problem in literal(form, name):
                raise ValueError(problem)


def _problem(path: Path, error: Exception) -> Problem:
    if isinstance(error, SystemFault):
        raise error
    if isinstance(error, StateError):
        return Problem(path, error.what)
    if isinstance(error, FileNotFoundError):
        return Problem(path, "is gone")
    if isinstance(error, OSError | MemoryError):
        # A fault of the machine is none of the file.
        reason = getattr(error, "strerror", None) or "out of memory"
        raise SystemFault(path, f"cannot be read: {reason}") from error
    # A stranger can write anything, with digests that agree.
    return Problem(path, f"is nothing that stage 1 writes: {type(error).__name__}")
