"""`dstrain cache verify`: read every byte of a feature cache, and name what is damaged; with
--repair, remove it and name the command that fills it again.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dstrain.cache.addresses import (
    ABSENT,
    ADDRESS,
    Addresses,
    find,
    in_order,
    packed,
    prefixes,
)
from dstrain.cache.backend.index import check_is_cache, damaged_files, may_be_ours
from dstrain.cache.backend.plan_files import (
    StoredPlan,
    plan_paths,
    read_record,
    stored_plans,
)
from dstrain.cache.backend.shards import shard_paths
from dstrain.cache.commands.contents import rewrite_shard
from dstrain.cache.in_use import exclusive, reading
from dstrain.cache.plan_records import literal
from dstrain.cache.store import FeatureCache
from dstrain.console import (
    get_logger,
    number_of,
    printable,
    progress_bar,
    redacted,
    shell_command,
)
from dstrain.errors import CacheError, StateError, SystemFault

logger = get_logger(__name__)
AGAIN = "to fill it again, run the commands of stage 1 that filled it"


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

    Raises StateError if something is damaged in the end, and while another process
    removes something from the cache.
    """
    found = _report(folder)
    if found.problems and repair is not None:
        repair(found.problems)
        found = _report(folder)
    if found.problems:
        files = len({problem.path for problem in found.problems})
        what = f"{files} of its files are damaged or incomplete"
        words = ["dstrain", "cache", "verify", str(folder), "--repair"]
        advice = [f"to repair it, run: {shell_command(words)}"]
        raise StateError(folder, what, *([] if repair else advice))


def _report(folder: Path) -> Verified:
    """Read every byte of a cache, from which nothing can be removed meanwhile; print what
    was found, and return it.
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
    shards = shard_paths(folder)
    plans = plan_paths(folder)
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
            problems += _plan_problems(path, known)
            progress.update()
    problems += [Problem(*one) for one in damaged_files(folder)]
    return Verified(len(shards), len(known), len(plans), tuple(problems))


def _shard(folder: Path, path: Path) -> Iterator[str | Problem]:
    """Yield the address of each value of a shard that is whole, and what is wrong."""
    try:
        # Each shard has a reader of its own, so that no more than one is open.
        cache = FeatureCache.of_shards(folder, [path])
    except Exception as error:
        yield _problem(path, error)
        return
    for number, address in enumerate(cache):
        try:
            cache.read_at(number)
        except Exception as error:
            yield _problem(path, error)
        else:
            yield address


def _plan_problems(path: Path, known: Addresses) -> Iterator[Problem]:
    """Yield what is wrong with a plan, where the values at these addresses are present,
    sorted.
    """
    first = prefixes(known)
    try:
        plan = StoredPlan(path, read_record(path))
        # What a stranger wrote may lead out of its own columns.
        plan.validate()
        rows = plan.samples()
        lacking = np.zeros(len(rows), np.bool_)
        for name, addresses in rows.stored.items():
            numbers = find(addresses, known, first)
            lacking |= rows.has(name) & (numbers == ABSENT)
        missing = int(lacking.sum())
        for name, forms in rows.literals.items():
            for problem in (one for form in forms for one in literal(form, name)):
                raise ValueError(problem)
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
    if (find(packed(plan.prompt_addresses), known, first) == ABSENT).any():
        what = "needs values of rows of plugins that are not here or damaged"
        yield Problem(path, what)


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


def repair(folder: Path, problems: Sequence[Problem]) -> None:
    """Remove what is damaged: of a shard the values that are whole stay. What was removed
    or repaired since the problems were found is left as it is.

    Raises StateError for a cache that is in use, for a file that stage 1 did not write,
    and with the commands to run where plans then lack values; SystemFault for a file that
    cannot be read, which is not removed.
    """
    check_is_cache(folder)
    damaged = list(dict.fromkeys(problem.path for problem in problems))
    with exclusive(folder):
        for path in damaged:
            if path.exists() and not may_be_ours(path):
                what = "is nothing that stage 1 writes"
                raise StateError(path, what, "move it away")
        derived = {path for path, _ in damaged_files(folder)}
        lost = [path.stem for path in damaged if _removes_plan(folder, path, derived)]
        cache = FeatureCache.open(folder)
        cache.write_index()
        known = cache.index.addresses[in_order(cache.index.addresses)]
        incomplete = [
            plan
            for plan in stored_plans(folder)
            if any(_plan_problems(plan.path, known))
        ]
    if incomplete or lost:
        names = ", ".join([*lost, *(plan.name for plan in incomplete)])
        advice = [_refill(plan, folder) for plan in incomplete]
        removal = [f"to remove a plan, delete {plan.path}" for plan in incomplete]
        raise StateError(
            folder,
            f"what was damaged is removed; plans need values again: {names}",
            *dict.fromkeys(advice or [AGAIN]),
            *removal,
        )


def _removes_plan(folder: Path, path: Path, derived: set[Path]) -> bool:
    """Remove a file if it is damaged now; return whether it was the record of a plan."""
    if path in shard_paths(folder):
        found = list(_shard(folder, path))
        whole = [one for one in found if isinstance(one, str)]
        if len(whole) < len(found):
            rewrite_shard(folder, path, whole)
            logger.info(f"removed {path}; {len(whole)} of its values stay")
    elif path in plan_paths(folder):
        try:
            read_record(path)
        except CacheError:
            path.unlink()
            return True
    elif path in derived:
        path.unlink()
    return False


def _refill(plan: StoredPlan, folder: Path) -> str:
    """Return how to fill a plan's values again: the recorded command, a stranger's maybe,
    as it is typed, unless a terminal would not show it as it is.
    """
    config = plan.info.config
    cache = ["--feature_cache", os.path.abspath(folder)]
    command = shell_command(["dstrain", *config.get("words", ()), *cache])
    advice = f"to fill it again, run in {config.get('folder')}: {command}"
    return advice if "words" in config and advice.isprintable() else AGAIN
