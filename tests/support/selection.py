"""Which tests a run takes, and what they take.

The everyday tests always run; of a table of trials (`promise`), each tenth case is an
everyday test. The other cases, variants whose mechanisms another one has, planted bugs, and
tests that take long are *drawn*: `--all-cases` (`make everything`) takes all, `--seconds N`
(`make test`) as many as fit, first those of files that have changed. Without either option,
none are.

How long a test takes is recorded in `tests/times.json`.
"""

import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dstrain.registry import load_family

from tests.support import ROOT, cpu

TENTH = 10
LONG = 0.3
"""CPU seconds of a case; a test that takes as long is drawn."""
LEAST = 0.05
"""CPU seconds of a case; of a test that takes less, and is not drawn, no time is recorded."""
UNKNOWN = 10.0
"""CPU seconds that a drawn test without a recorded time counts."""
TIMES = ROOT / "tests/times.json"
MENDED = ROOT / "tests/mended_trials.txt"
"""Trials that were drawn, failed, and are mended: they are everyday tests since."""
BUGS = "tests/planted_bugs.toml"
PROMISES = {
    "cache": "R1 R3 R5 R6",
    "cli": "R7 R13 R17",
    "config": "R7 R13 R17",
    "data": "R7 R11 R14",
    "distributed": "R8 R9",
    "generation": "R18 R19",
    "graph": "R10",
    "lora": "R18",
    "models": "R20 R21",
    "pipeline": "R19",
    "registry": "R12",
    "runs": "R1 R2 R4 R6 R9 R16 R17",
    "storage": "R3 R4 R5 R14 R16",
    "training": "R2 R8 R10",
}
"""The promises whose tables try a package of core."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="Run every case.")
    parser.addoption("--seconds", type=float, help="CPU seconds, for cases drawn.")
    parser.addoption("--report", type=Path, help="A JSON file: what was run.")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "promise(number, words): each case is a trial of a promise",
        "drawn: a case that not every run takes",
    ):
        config.addinivalue_line("markers", line)
    config.pluginmanager.register(_Run(), "selection")


@dataclass(frozen=True)
class Change:
    """The files that differ from a base revision."""

    base: str
    files: frozenset[str]
    bugs: str = ""
    """The table of planted bugs at the base."""

    def reaches(self, item: pytest.Item) -> bool:
        """Return whether a test is of a changed file: a planted bug that is new or in it, or
        a test of its package, of its plugin or of a promise that tries its package.
        """
        bug = _parameters(item).get("bug")
        if bug is not None:
            is_new = self.bugs and f'name = "{bug.name}"' not in self.bugs
            return bug.file in self.files or bool(is_new)
        path = item.path.relative_to(ROOT).as_posix()
        promise = item.get_closest_marker("promise")
        places = {place for file in self.files for place in _tests_of(file)}
        return bool(promise and promise.args[0] in places) or any(
            path.startswith(place) for place in places
        )


@cache
def _tests_of(file: str) -> tuple[str, ...]:
    """Return where the tests of a file are, and the promises that try it."""
    first, *rest = Path(file).parts
    if first == "plugins" and rest:
        return (f"plugins/{rest[0]}/",)
    if file.startswith(("core/dstrain/testing/", "core/dstrain/plugin/")):
        return "plugins/", "tests/unit/testing/"
    if file.startswith("core/dstrain/"):
        is_package = len(rest) > 2
        place = f"tests/unit/{rest[1]}/" if is_package else f"tests/unit/test_{rest[1]}"
        return place, *PROMISES.get(rest[1], "").split()
    if first == "docs" or file.startswith(("conftest", "tests/support/", "tools/")):
        return ("tests/integration/",)
    return (file,)


def changed() -> Change:
    """Return what differs from `CI_BASE`, else from `origin/HEAD`, else from the first
    parent: the first of these that exists and is not this revision.
    """
    for base in (os.environ.get("CI_BASE"), "origin/HEAD", "HEAD^"):
        common = base and _git("merge-base", base, "HEAD")
        if common and common != _git("rev-parse", "HEAD"):
            names = _git("diff", "--name-only", common)
            new = _git("ls-files", "--others", "--exclude-standard")
            files = frozenset(f"{names}\n{new}".splitlines()) - {""}
            return Change(str(base), files, _git("show", f"{common}:{BUGS}"))
    return Change("none", frozenset())


def _git(*words: str) -> str:
    done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def split(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the everyday tests, and those that are drawn."""
    mended = set(MENDED.read_text().splitlines())
    seen: Counter[str] = Counter()
    first: dict[tuple[str, str], object] = {}
    everyday, drawn = [], []
    for item in items:
        test = _test_of(item.nodeid)
        is_drawn = bool(item.get_closest_marker("drawn")) or _is_left(item, first)
        if not is_drawn and item.get_closest_marker("promise"):
            seen[test] += 1
            is_drawn = seen[test] % TENTH != 1
        elif not is_drawn:
            is_drawn = seconds_of(item) >= LONG
        (drawn if is_drawn and item.nodeid not in mended else everyday).append(item)
    return everyday, drawn


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _is_left(item: pytest.Item, first: dict[tuple[str, str], object]) -> bool:
    """Return whether a test of the conformance kit is of a variant whose mechanisms another
    one has: its class names the others in `everyday`, each with its denoiser and with the
    components that no earlier one has.

    Args:
        first: Test and component -> the first of those variants; filled here.
    """
    everyday = getattr(getattr(item, "cls", None), "everyday", None)
    parameters = _parameters(item)
    case = parameters.get("case")
    variant = parameters.get("variant", getattr(case, "variant", None))
    if everyday is None:
        return False
    if variant not in (None, *everyday):
        return True
    trained = parameters.get("trained")
    given = [parameters.get(name) for name in ("component", "adapted")]
    named = trained.components if trained else [one for one in given if one]
    family = load_family(item.cls.family)  # type: ignore[attr-defined]  # of a conformance kit
    test = _test_of(item.nodeid)
    others = [name for name in named if name != family.default_trainable]
    by = [first.setdefault((test, name), variant) for name in others]
    return bool(by) and variant not in by


@cache
def times() -> Mapping[str, float]:
    """Return the CPU seconds of a case of each test that takes long; under 'other', those of
    any other test, and under 'start', those before the first test.
    """
    return {
        str(name): float(one) for name, one in json.loads(TIMES.read_text()).items()
    }


def seconds_of(item: pytest.Item) -> float:
    """Return the CPU seconds that a test is known to take."""
    other = UNKNOWN if item.get_closest_marker("drawn") else times()["other"]
    return times().get(_test_of(item.nodeid), other)


def _test_of(name: str) -> str:
    """Return the name of a test without its parameters."""
    return name.partition("[")[0]


def draw(
    everyday: list[pytest.Item], candidates: list[pytest.Item], seconds: float
) -> tuple[list[pytest.Item], str]:
    """Return the candidates that fit into the seconds beside the everyday tests, and a line
    about the draw: one of each kind in turn, those that a change reaches first. The seed is
    the revision, so that each draws others.
    """
    change = changed()
    head = _git("rev-parse", "HEAD")
    order = sorted(candidates, key=lambda item: item.nodeid)
    random.Random(head).shuffle(order)
    turns: Counter[str] = Counter()
    turn = {}
    for item in order:
        turns[kind_of(item)] += 1
        turn[item] = turns[kind_of(item)]
    order.sort(key=lambda item: (not change.reaches(item), turn[item]))
    left = seconds - times()["start"] - sum(map(seconds_of, everyday))
    if left < 0:
        what = (
            f"the everyday tests take {seconds - left:.0f} CPU seconds of {seconds:.0f}"
        )
        raise pytest.UsageError(f"{what}: nothing else would ever be drawn")
    taken = []
    for item in order:
        if seconds_of(item) <= left:
            left -= seconds_of(item)
            taken.append(item)
    line = (
        f"{len(change.files)} files differ from {change.base}; {len(everyday)} everyday"
        f" tests, {len(taken)} of {len(candidates)} others: {seconds - left:.0f} of"
        f" {seconds:.0f} CPU seconds"
    )
    return taken, line


def kind_of(item: pytest.Item) -> str:
    """Return what a test that is left out belongs to: a promise, or its file."""
    promise = item.get_closest_marker("promise")
    return str(promise.args[0]) if promise else item.path.stem.removeprefix("test_")


class _Run:
    """What one process notes about its tests; that which started it prints all."""

    def __init__(self) -> None:
        self.about: dict[str, Any] = {"line": "", "left": {}, "drawn": [], "start": 0.0}
        self.cpu = 0.0
        self.began = 0.0
        self.reports: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        for item in items:
            promise = item.get_closest_marker("promise")
            if promise:
                item.user_properties.append(("promise", list(promise.args)))
        everyday, candidates = split(items)
        if config.getoption("--all-cases"):
            self.about["drawn"] = [item.nodeid for item in candidates]
            return
        seconds = config.getoption("--seconds")
        taken: list[pytest.Item] = []
        if seconds:
            taken, self.about["line"] = draw(everyday, candidates, seconds)
            self.about["drawn"] = [item.nodeid for item in taken]
        kept = {*everyday, *taken}
        left = [item for item in items if item not in kept]
        self.about["left"] = dict(Counter(map(kind_of, left)).most_common())
        items[:] = [item for item in items if item in kept]
        if left:
            config.hook.pytest_deselected(items=left)

    def pytest_collection_finish(self) -> None:
        self.about["start"] = cpu.seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self.began = cpu.seconds()
        yield
        item.user_properties.append(("setup", cpu.seconds() - self.began))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield
        # Read from the report of the teardown, wherever that is collected.
        item.user_properties.append(("cpu", cpu.seconds() - self.began))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.reports[report.nodeid] = {"failed": False, "skipped": True}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self.reports.setdefault(report.nodeid, {"failed": False})
        known["failed"] |= report.failed
        known.update(report.user_properties)
        if report.failed:
            known["why"] = report.longreprtext
        known["skipped"] = known.get("skipped", False) or report.skipped

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        self.cpu += cpu.seconds()
        if output is not None:
            output["about"] = {**self.about, "cpu": self.cpu}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a process of pytest-xdist has noted."""
        about = getattr(node, "workeroutput", {}).get("about")
        if about:
            self.cpu += about.pop("cpu")
            self.about = {**about, "start": self.about["start"] + about["start"]}

    def pytest_terminal_summary(
        self, terminalreporter: Any, config: pytest.Config
    ) -> None:
        write = terminalreporter.write_line
        if self.about["line"]:
            write(self.about["line"])
        if self.about["left"]:
            left = (f"{count} of {name}" for name, count in self.about["left"].items())
            write(f"left out: {', '.join(left)}")
        failed = [name for name, one in self.reports.items() if one["failed"]]
        for name in set(failed) & set(self.about["drawn"]):
            write(f"when this is mended, add it to {MENDED.name}: {name}")
        write(f"{self.cpu:.0f} CPU seconds")
        path = config.getoption("--report")
        if path:
            result = {
                "cpu": self.cpu,
                "start": self.about["start"],
                "drawn": self.about["drawn"],
                "tests": self.reports,
            }
            path.write_text(json.dumps(result, default=str))


def recorded(results: list[Mapping[str, Any]]) -> dict[str, float]:
    """Return the table of `times` that reports of `--all-cases` give."""
    sums: dict[str, list[float]] = {}
    for result in results:
        for name, one in result["tests"].items():
            if "cpu" in one:  # its process did not crash
                sums.setdefault(_test_of(name), []).append(one["cpu"])
    means = {name: sum(cases) / len(cases) for name, cases in sums.items()}
    drawn = {_test_of(name) for result in results for name in result["drawn"]}
    long = {
        name: round(mean, 2)
        for name, mean in sorted(means.items())
        if mean >= LEAST or name in drawn
    }
    short = [one for name, cases in sums.items() if name not in long for one in cases]
    start = max(result["start"] for result in results)
    return {"start": round(start), "other": round(sum(short) / len(short), 3), **long}
