"""Store what is remembered for a user, in the user's folder of caches."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dstrain.errors import SystemFault
from dstrain.storage.file_memory import ManyFiles

VARIABLE = "DSTRAIN_CACHE"


def user_cache(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of what is remembered for a user; None for one without a home."""
    if environment.get(VARIABLE):
        return Path(environment[VARIABLE])
    # A relative one counts as unset, says the XDG Base Directory Specification.
    xdg = Path(environment.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg / "dstrain"
    with suppress(RuntimeError):
        return Path.home() / ".cache" / "dstrain"
    return None


def save_for_user(memory: ManyFiles) -> None:
    """Store what is remembered in a user's folder, where that is possible."""
    if user_cache() is not None:
        with suppress(SystemFault, OSError):
            memory.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            ManyFiles.save(memory)
