"""What takes time is made once in a run of tests, which may have several processes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def once(name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder of this name, to be read or copied; `make` fills it where no
    process of this run has.
    """
    folder = Path(os.environ["TMPDIR"], "once", name)
    done = folder.with_name(f"{folder.name}.done")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            done.touch()
    return folder
