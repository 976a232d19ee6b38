"""R15: the tests have teeth: each of thirty bugs and more, planted in a copy of the project, is
caught by its tests.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.planted_bugs import BUGS, Bug

PARTS = ("core", "plugins", "tests", "conftest.py", "pyproject.toml")


def test_each_bug_is_of_its_own_and_can_be_planted() -> None:
    assert (
        len(BUGS)
        == len({bug.name for bug in BUGS})
        == len({bug.breaks for bug in BUGS})
        >= 30
    )
    for bug in BUGS:
        assert (ROOT / bug.file).read_text().count(bug.old) == 1, bug.name
        assert all((ROOT / test).exists() for test in bug.tests), bug.name


@pytest.mark.promise("R15", "the tests have teeth: planted bugs are caught")
@pytest.mark.parametrize("bug", BUGS, ids=attrgetter("name"))
def test_a_planted_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    for part in PARTS:
        place, ignored = (
            tmp_path / part,
            shutil.ignore_patterns("__pycache__", ".*_cache", "dist", "*.egg-info"),
        )
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, place, ignore=ignored)
        else:
            shutil.copy(ROOT / part, place)
    sound = (tmp_path / bug.file).read_text()
    (tmp_path / bug.file).write_text(sound.replace(bug.old, bug.new))
    caught = outcome_of(tmp_path, bug.tests)
    assert caught.returncode == 1, (
        f"not caught by {', '.join(bug.tests)}:\n{caught.stdout[-2000:]}{caught.stderr[-2000:]}"
    )
    lines = [
        line
        for line in caught.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    failed = [line.partition(" ")[2].partition(" - ")[0] for line in lines]
    (tmp_path / bug.file).write_text(sound)
    without = outcome_of(tmp_path, failed)
    assert without.returncode == 0, (
        f"fails without the bug as well:\n{without.stdout[-2000:]}"
    )


def outcome_of(
    project: Path, tests: Sequence[str]
) -> "subprocess.CompletedProcess[str]":
    """Run tests of a copy of the project, on the copy's sources, up to the first
    failure.
    """
    sources = [
        str(folder)
        for folder in (project / "core", *(project / "plugins").iterdir())
        if folder.is_dir()
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sources),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    return subprocess.run(
        command,
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
