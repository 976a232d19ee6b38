"""What all tests share: how many trials of a promise run and how they are counted, and
environments for packages.

A test of a promise is marked `promise(number, words)`. Each case of its table is one
trial, or the test asks the fixture `trials` how many to make. The ordinary suite runs a
tenth of them; `--all-trials` (`make reliability`) runs all and prints a table.
"""

import os
import subprocess
import sys
import sysconfig
import types
import venv
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain import TrainConfig
from dstrain.lazy import own_process

from tests.support.pages import set_page_width

TENTH = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-trials",
        action="store_true",
        help="Run every trial of every promise, not a tenth.",
    )


def pytest_configure(config: pytest.Config) -> None:
    # On CI, pytest computes the whole difference of what is not equal: of the bytes of two
    # files that takes hours.
    for name in ("CI", "BUILD_NUMBER"):
        os.environ.pop(name, None)
    # As a command line does, tests import no library that quantizes unless they use it.
    own = own_process()
    own.__enter__()
    config.add_cleanup(lambda: own.__exit__(None, None, None))
    config.addinivalue_line(
        "markers",
        "promise(number, words): each case is a trial; the ordinary suite runs a tenth",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave nine of ten cases of a promise's test to `--all-trials`."""
    seen: Counter[str] = Counter()
    kept, left = [], []
    for item in items:
        mark = item.get_closest_marker("promise")
        if mark is not None:
            item.user_properties.append(("promise", list(mark.args)))
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] % TENTH != 1 and not config.getoption("--all-trials"):
                left.append(item)
                continue
        kept.append(item)
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Total -> how many of so many trials this run makes: all, or a tenth, but one at
    least.
    """

    def share(total: int) -> int:
        count = (
            total
            if request.config.getoption("--all-trials")
            else max(1, total // TENTH)
        )
        request.node.user_properties.append(("trials", count))
        return count

    return share


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[[str, int], None]:
    """Note a number beside the trials, such as ("kills", 2): the table has its sum."""
    return lambda name, number: request.node.user_properties.append((name, number))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print promise, trials and failures, in a run of all trials."""
    if not config.getoption("--all-trials"):
        return
    found: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.getreports(outcome):
            properties = getattr(
                report, "user_properties", ()
            )  # a file that cannot be collected has none
            promise = next(
                (value for name, value in properties if name == "promise"), None
            )
            if promise and (report.when == "call" or outcome != "passed"):
                numbers = [entry for entry in properties if entry[0] != "promise"]
                sums = found[tuple(promise)]
                sums["failures"] += outcome != "passed"
                for name, number in (
                    numbers if "trials" in dict(numbers) else [*numbers, ("trials", 1)]
                ):
                    sums[name] += number
    terminalreporter.section("promises")
    for (number, words), sums in sorted(
        found.items(), key=lambda entry: (int(entry[0][0][1:]), entry[0][1])
    ):
        more = "".join(
            f", {sums[name]} {name}"
            for name in sums
            if name not in ("trials", "failures")
        )
        terminalreporter.line(
            f"{number:4} {words:72} {sums['trials']:5} trials{more}, {sums['failures']} failures"
        )


@pytest.fixture(scope="session")
def empty_environment() -> Callable[[Path], Path]:
    """Folder -> the Python of a new environment there, with what this one has less core
    and its plugins.
    """

    def make(place: Path) -> Path:
        venv.create(place, with_pip=False)
        python = place / "bin/python"
        command = (
            str(python),
            "-c",
            "import sysconfig; print(sysconfig.get_path('purelib'))",
        )
        site = Path(
            subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.strip()
        )
        for part in Path(sysconfig.get_path("purelib")).iterdir():
            # Neither the metadata of our packages nor the links to their sources.
            ours = part.name.startswith(("core-", "plugin_")) or part.suffix == ".pth"
            if not ours and not (site / part.name).exists():
                (site / part.name).symlink_to(part)
        return python

    return make


@pytest.fixture
def wide_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of a page is broken: the paths of tests are long."""
    set_page_width(monkeypatch, 1000)


@pytest.fixture
def runs(
    fake_plugin: Callable[..., Path],
    family_source: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> list[TrainConfig]:
    """The configurations that the runner is given; the family `faky` is installed."""
    source = family_source("faky")
    fake_plugin("plugin-faky", {"faky": "faky_record:MODEL"}, {"faky_record": source})
    given: list[TrainConfig] = []
    runner = types.ModuleType("dstrain.runs.runner")
    runner.__dict__["start"] = given.append
    monkeypatch.setitem(sys.modules, "dstrain.runs.runner", runner)
    return given
