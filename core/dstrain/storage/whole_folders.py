"""Write folders so that they are either complete or absent."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dstrain.storage.files import sync_folder, write_fault
from dstrain.storage.temporaries import final_name, own_paths, set_aside, temporary


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write, and rename it to `folder` if nothing fails.

    The files in it must be synced. A folder of that name is set aside until the new one
    is in place; files that only the old one has are kept. Any OSError becomes
    SystemFault.
    """
    building = temporary(folder)
    try:
        finish_replacing(folder.parent)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        yield building
        sync_folder(building)
        if folder.is_dir():
            folder.rename(set_aside(folder))
        building.rename(folder)
        sync_folder(folder.parent)
        finish_replacing(folder.parent)
    except BaseException as error:
        shutil.rmtree(building, ignore_errors=True)
        with suppress(OSError):
            finish_replacing(folder.parent)
        if isinstance(error, OSError):
            raise write_fault(folder, 0, error) from error
        raise


def finish_replacing(folder: Path) -> None:
    """Finish what `replacing_folder` began in this folder before it was killed, or undo
    it where the new folder is not in place; the caller holds the lock.
    """
    for old in own_paths(folder, ".replaced-"):
        new = folder / final_name(old.name)
        if not new.exists():
            old.rename(new)
            continue
        if old.is_symlink():
            old.unlink()  # what it leads to stays
            continue
        for path in old.iterdir():
            if not (new / path.name).exists():
                path.rename(new / path.name)
        remove_folder(old)


def remove_folder(folder: Path) -> None:
    """Remove a folder if it exists, so that no part of it remains under its own name.

    A link stays: it is not the folder that it leads to.
    """
    if folder.exists() and not folder.is_symlink():
        doomed = temporary(folder)
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)
