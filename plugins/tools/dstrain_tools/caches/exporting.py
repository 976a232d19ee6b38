"""`dstrain cache export`: write what plans use as a folder or a tar, a cache of its own."""

import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from dstrain import CacheError, SystemFault
from dstrain.cache import (
    MARKER,
    Contents,
    FeatureCache,
    PlanContents,
    make_folders,
    named_plan,
    open_contents,
    replacing,
    temporary,
    write_part,
)
from dstrain.plugin import UsageError, progress_bar
from dstrain.plugin.commands import as_size, number_of

TAR = ".tar"
ARCHIVES = (".gz", ".tgz", ".zip", ".bz2", ".xz", ".zst", ".7z")
Add = Callable[[str, Path], None]
"""(name in the cache, the file) -> adds it to what is written."""


def export(folder: Path, output: Path, names: Sequence[str]) -> None:
    """Write the plans of these names, or all, with the values they use.

    Raises StateError for a folder that is no cache, is damaged, or lacks values of these
    plans; UsageError for an output that exists, or that is another kind of archive, and
    for the name of no plan; SystemFault if it cannot be written.
    """
    if output.suffix in ARCHIVES:
        what = f"{output} would be compressed, which saves nothing here"
        raise UsageError("OUTPUT", what, "name a folder, or a file that ends with .tar")
    if os.path.lexists(output):
        what = f"{output} already exists; existing files were not modified"
        raise UsageError("OUTPUT", what, "move it away, or give another OUTPUT")
    with open_contents(folder) as contents:
        _export(contents, output, names)


def _export(contents: Contents, output: Path, names: Sequence[str]) -> None:
    plans = [named_plan(contents.plans, name) for name in names] or contents.plans
    if not plans:
        raise CacheError(contents.cache.folder, "contains no plan")
    for plan in plans:
        if plan.lacks_values:
            raise CacheError(plan.stored.path, "needs values that the cache lacks")
    write = _tar if output.suffix == TAR else _folder
    with write(Path(os.path.abspath(output))) as (add, scratch):
        _add_all(contents, plans, add, scratch)
    values = np.flatnonzero(contents.used_by(plans))
    size = as_size(int(contents.nbytes[values].sum()))
    counted = number_of(f"{len(values):,}", "value")
    print(f"wrote {output}: {number_of(len(plans), 'plan')}, {counted}, {size}")


def _add_all(
    contents: Contents, plans: Sequence[PlanContents], add: Add, scratch: Path
) -> None:
    """Add the parts of a cache: the marker, shards with what is used, then the plans."""
    folder = contents.cache.folder
    make_folders(scratch)
    add(MARKER, folder / MARKER)
    used = contents.used_by(plans)
    with progress_bar("export", len(contents.shards)) as progress:
        for number, path in enumerate(contents.shards):
            there = np.flatnonzero((contents.shard == number) & used)
            kept = [one.tobytes().hex() for one in contents.addresses[there]]
            if len(kept) == contents.held[number]:
                cache = FeatureCache.of_shards(folder, [path])
                for address in cache:
                    cache.read(address)
                add(path.relative_to(folder).as_posix(), path)
            elif kept:
                for part in write_part(folder, path, kept, FeatureCache(scratch)):
                    add(part.relative_to(scratch).as_posix(), part)
                    part.unlink()
            progress.update()
    # Plans may have columns in common.
    for path in dict.fromkeys(path for plan in plans for path in plan.stored.parts):
        add(path.relative_to(folder).as_posix(), path)


@contextmanager
def _tar(output: Path) -> Iterator[tuple[Add, Path]]:
    """Write a tar: equal contents give equal bytes, and nobody's name is in it."""
    with (
        _building(output.parent, output) as scratch,
        replacing(output) as building,
        tarfile.open(building, "w:", format=tarfile.PAX_FORMAT) as tar,
    ):

        def add(name: str, path: Path) -> None:
            member = tarfile.TarInfo(name)
            member.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(member, file)

        yield add, scratch


@contextmanager
def _folder(output: Path) -> Iterator[tuple[Add, Path]]:
    """Write a folder under a temporary name, and rename it."""
    with _building(output.parent, output) as building:
        scratch = building / "scratch"

        def add(name: str, path: Path) -> None:
            (building / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, building / name)
            with (building / name).open("rb+") as file:
                os.fsync(file.fileno())

        yield add, scratch
        shutil.rmtree(scratch)
        building.rename(output)


@contextmanager
def _building(parent: Path, output: Path) -> Iterator[Path]:
    """Yield a new temporary folder, which is gone afterwards; OSError becomes SystemFault."""
    building = temporary(parent / f"{output.name}-parts")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        yield building
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise SystemFault(output, what) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
