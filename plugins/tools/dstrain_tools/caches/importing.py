"""`dstrain cache import`: add what another machine exported to a feature cache.

What is imported is a stranger's. It is copied beside the cache first, with only files of
the names and kinds that a cache has, and every byte is verified there; then shards are
moved into the cache, and after them the plans, which commit it.
"""

import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG

from dstrain import CacheError, StateError, SystemFault
from dstrain.cache import (
    EXPORTED,
    MARKER,
    PART,
    FeatureCache,
    StoredPlan,
    check_is_cache,
    commit_plans,
    is_cache,
    lock,
    make_folders,
    parts_in,
    plan_name,
    stored_plans,
    temporary,
    verified,
)
from dstrain.plugin import UsageError, remove_leftovers
from dstrain.plugin.commands import as_size, number_of, shell_command

STRANGER = "it is not what `dstrain cache export` wrote, and nothing was imported"
AGAIN = "export or copy it again; nothing was imported"


def import_cache(source: Path, folder: Path) -> None:
    """Add the plans and values of an export, a folder or a tar, to a feature cache, which
    is made if there is none.

    Raises UsageError where the source is missing; StateError for a source that is
    damaged, has other files than an export, or a plan that the cache has with other
    values, for a folder that is something else than a cache, and for a cache that is in
    use. Nothing is imported then.
    """
    if not source.exists():
        raise UsageError("INPUT", f"{source} does not exist")
    _check_target(folder)
    with lock(folder):
        remove_leftovers(folder)
        with _staging(folder) as staged:
            if source.is_dir():
                _copy_folder(source, staged)
            else:
                _extract(source, staged)
            count = _verified(source, staged)
            plans = _plans(source, staged, folder)
            _move(staged, folder, plans)
    values = number_of(count, "value")
    print(f"imported {values} and {number_of(len(plans), 'plan')} into {folder}")
    print(
        f"to train on it, give --feature_cache {folder} and --task TASK:train;"
        " no dataset and no encoders are needed"
    )


def _check_target(folder: Path) -> None:
    """Raise StateError for a folder that is neither a feature cache nor empty."""
    if is_cache(folder):
        check_is_cache(folder)
    # The lock, and what a run that died has left, are hidden.
    elif folder.is_dir() and any(folder.glob("[!.]*")):
        what = f"is not empty, and not a feature cache: {MARKER} not found"
        raise StateError(folder, what, "name a new folder, or a feature cache")


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Yield an empty folder on the disk of the cache; OSError becomes SystemFault."""
    staged = temporary(folder / "import")
    try:
        staged.mkdir(parents=True)
        yield staged
    except OSError as error:
        what = f"cannot import: {error.strerror or error}"
        raise SystemFault(folder, what, "nothing was imported") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _copy_folder(source: Path, staged: Path) -> None:
    check_is_cache(source)
    paths = parts_in(source)
    for path in paths:
        name = path.relative_to(source).as_posix()
        if not PART.fullmatch(name) or not S_ISREG(path.lstat().st_mode):
            what = f"contains {name}, which is no file of an export"
            raise StateError(source, what, STRANGER)
    _check_space(sum(path.stat().st_size for path in paths), staged)
    for path in paths:
        target = staged / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def _extract(source: Path, staged: Path) -> None:
    """Extract a tar. It is not compressed, so that no more is written than was read."""
    size = source.stat().st_size
    _check_space(size, staged)
    try:
        with tarfile.open(source, "r:") as tar:
            for member in tar:
                _check_member(source, staged, member, size)
                if not member.isdir():
                    tar.extract(member, staged, set_attrs=False, filter="data")
    except (tarfile.TarError, EOFError, ValueError, UnicodeError) as error:
        what = f"cannot be read as a tar: {error}"
        raise StateError(source, what, AGAIN) from error


def _check_member(
    source: Path, staged: Path, member: tarfile.TarInfo, size: int
) -> None:
    """Raise StateError for anything but a file of an export, once."""
    name = member.name
    if member.isdir() and name.rstrip("/") in EXPORTED:
        return
    reason = ""
    if not PART.fullmatch(name):
        reason = "which is no file of an export"
    elif not member.isreg() or member.issparse():
        reason = "which is not a regular file"
    elif member.size > size:
        reason = "which is larger than the tar"
    elif (staged / name).exists():
        reason = "twice"
    if reason:
        raise StateError(source, f"contains {name[:200]!r}, {reason}", STRANGER)


def _check_space(size: int, staged: Path) -> None:
    free = shutil.disk_usage(staged).free
    if size > free:
        what = f"has {as_size(free)} free, and the import takes {as_size(size)}"
        raise SystemFault(staged.parent, what, "free some space, or use another disk")


def _verified(source: Path, staged: Path) -> int:
    try:
        found = verified(staged)
    except StateError as error:
        raise StateError(source, f"{MARKER} {error.what}", AGAIN) from error
    for problem in found.problems:
        name = problem.path.relative_to(staged).as_posix()
        raise StateError(source, f"{name} {problem.what}", AGAIN)
    return found.values


def _plans(source: Path, staged: Path, folder: Path) -> list[StoredPlan]:
    """Return the plans that the cache will have for the imported ones, in order.

    Raises StateError for two plans of one name, and for one that would replace a plan
    with other values.
    """
    own = {plan.name: plan for plan in stored_plans(folder)}
    found: dict[str, StoredPlan] = {}
    for plan in sorted(stored_plans(staged), key=lambda plan: plan.sequence):
        name = plan_name(plan.record)
        if name in found:
            raise StateError(source, f"contains plan {name} twice", STRANGER)
        found[name] = plan
        has_equal = _has_equal_values(plan, own[name]) if name in own else None
        if has_equal is False:
            raise _other_values(source, folder, name)
        if has_equal:
            # It knows the files of the dataset as they are here.
            found[name] = own[name]
    return list(found.values())


def _has_equal_values(plan: StoredPlan, own: StoredPlan) -> bool | None:
    """Return whether two plans have the same samples and previews; None if those of the
    second one are damaged.
    """
    try:
        digest = own.samples().digest
    except CacheError:
        return None
    return (
        plan.samples().digest == digest
        and plan.info.prompt_rows == own.info.prompt_rows
    )


def _other_values(source: Path, folder: Path, name: str) -> StateError:
    """Return the error for a plan that would replace one of the cache."""
    new = os.path.abspath(folder) + "-imported"
    apart = ["dstrain", "cache", "import", str(source), new]
    removal = ["dstrain", "cache", "prune", str(folder), "--plan", name]
    return StateError(
        source,
        f"contains plan {name}, which {folder} has with other values; nothing was imported",
        f"to have both, run: {shell_command(apart)}",
        f"to replace it, import again after: {shell_command(removal)}",
    )


def _move(staged: Path, folder: Path, plans: Sequence[StoredPlan]) -> None:
    """Move the marker and what plans need, then write the plans."""
    records = {plan.path for plan in stored_plans(staged)}
    marker, *paths = parts_in(staged)
    # First: a folder with anything else in it is taken for somebody's.
    if not is_cache(folder):
        marker.replace(folder / marker.name)
    make_folders(folder)
    for path in sorted({*paths} - records):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        # One of this name has the same values, or is damaged.
        path.replace(folder / path.relative_to(staged))
    # Opened after that: it must know the shards.
    FeatureCache.open(folder).write_index()
    commit_plans(folder, [plan.record for plan in plans])
