"""What tests of packages share: environments that have everything but the packages of this project."""

import subprocess
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_environment() -> Callable[[Path], Path]:
    """Folder -> the Python of a new environment there, with what this one has less core and its plugins."""

    def make(place: Path) -> Path:
        venv.create(place, with_pip=False)
        python = place / "bin/python"
        command = (str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        site = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        for part in Path(sysconfig.get_path("purelib")).iterdir():
            # Neither the metadata of our packages nor the links to their sources.
            ours = part.name.startswith(("core-", "plugin_")) or part.suffix == ".pth"
            if not ours and not (site / part.name).exists():
                (site / part.name).symlink_to(part)
        return python

    return make
