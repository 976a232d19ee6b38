"""R15: the tests have teeth: each bug of tests/planted_bugs.toml, planted in a copy of the
project, is caught by a test that is named beside it.
"""

import faulthandler
import os
import shutil
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import invalidate_caches
from operator import attrgetter
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.forks import in_clean_child

NO_SOURCES = frozenset({"demo_output", "dist", "models", "real_output", "site"})
"""What commands write into the project's folder."""
# Compiled files of Python are kept: they are compared with their sources.
NOT_KEPT = shutil.ignore_patterns("*-pytest-*.pyc", ".*", "*.egg-info")


@dataclass(frozen=True)
class Bug:
    """One edit of one file; breaks: the promise that it breaks."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: Sequence[str]


BUGS = [
    Bug(**row)
    for row in tomllib.loads((ROOT / "tests/planted_bugs.toml").read_text())["bug"]
]


def test_each_bug_is_of_its_own_and_can_be_planted() -> None:
    assert len(BUGS) == len({bug.name for bug in BUGS}) >= 170
    for bug in BUGS:
        assert (ROOT / bug.file).read_text().count(bug.old) == 1, bug.name
        assert bug.new != bug.old


@pytest.mark.drawn
@pytest.mark.promise("R15", "the tests have teeth: planted bugs are caught")
@pytest.mark.parametrize("bug", BUGS, ids=attrgetter("name"))
def test_a_planted_bug_is_caught(
    bug: Bug, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shutil.copytree(ROOT, tmp_path, ignore=left_out, dirs_exist_ok=True)
    sound = (ROOT / bug.file).read_text()
    (tmp_path / bug.file).write_text(sound.replace(bug.old, bug.new))
    failed = failed_tests(tmp_path, bug.tests)
    assert failed, f"not caught by {', '.join(bug.tests)}"
    # With its time, so that what was compiled meanwhile is not taken for it.
    shutil.copy2(ROOT / bug.file, tmp_path / bug.file)
    assert not failed_tests(tmp_path, failed), "fails without the bug as well"
    request.node.user_properties.append(("caught_by", failed[0]))


def left_out(folder: str, names: list[str]) -> set[str]:
    """Which names of a folder are not copied."""
    return NOT_KEPT(folder, names) | (NO_SOURCES if Path(folder) == ROOT else set())


class Failures:
    """A pytest plugin that notes which tests fail."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def failed_tests(project: Path, tests: Sequence[str]) -> list[str]:
    """Run tests of a copy of the project, on the copy's sources, up to the first
    failure; return what failed.
    """
    found = project / "failed"
    in_clean_child(_run, project, tests, found, log=project / "log")
    return found.read_text().splitlines()


def _run(project: Path, tests: Sequence[str], found: Path) -> int:
    # A fork of this child, in which its watching thread is not, would wait for that for
    # ever when it starts its own. What hangs is ended by pytest-timeout.
    faulthandler.cancel_dump_traceback_later()
    # What the server of children has imported is not the copy's.
    for name in [one for one in sys.modules if one.partition(".")[0] == "tests"]:
        del sys.modules[name]
    assert not any(name.startswith("dstrain") for name in sys.modules)
    sources = [project, project / "core", *(project / "plugins").iterdir()]
    sys.path[:0] = [str(folder) for folder in sources if folder.is_dir()]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[: len(sources)])
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(project)
    invalidate_caches()
    failures = Failures()
    words = ["-x", "--all-cases", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Of plugins of pytest that the server has imported.
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    # Less than this test may take itself: a bug may make one hang.
    words += [f"--basetemp={project / 'temporary'}", "--timeout=200"]
    code = pytest.main([*words, *tests], plugins=[failures])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), code
    found.write_text("\n".join(failures.names))
    return 0
