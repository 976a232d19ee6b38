"""Run all tests, group by group, with every trial, variant and planted bug; what has passed
is not run again on the same commit.

`python tools/everything.py` runs; with `--table` it prints what the last run of this commit
found, by group and by promise, and with `--record` it writes `tests/times.json` from it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.selection import TIMES, recorded  # noqa: E402  # of the project's folder
from tools.measure_tests import test_files  # noqa: E402  # of the project's folder

RESULTS = ROOT / ".results"
TWO_PROCESSES = ("-n", "2", "--dist", "worksteal")
FIXTURES = 5.0
"""CPU seconds that the fixtures of a test may take."""


def groups() -> dict[str, list[str]]:
    """Return the groups of tests: their names, and their files and folders."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests/unit").iterdir()):
        if path.is_dir() and any(path.rglob("test_*.py")):
            found[f"unit/{path.name}"].append(str(path.relative_to(ROOT)))
        elif path.match("test_*.py"):
            found["unit"].append(str(path.relative_to(ROOT)))
    for path in sorted((ROOT / "plugins").glob("*/tests")):
        found[f"plugins/{path.parent.name}"].append(str(path.relative_to(ROOT)))
    found["integration"] += ["tests/integration", "tests/seams"]
    for path in sorted((ROOT / "tests/reliability").glob("test_*.py")):
        number = path.stem.split("_")[1].upper().replace("R0", "R")
        found[number].append(str(path.relative_to(ROOT)))
    return dict(found)


def commit() -> str:
    """Return the commit, with '-changed' where the tree differs from it."""

    def git(*words: str) -> str:
        return subprocess.check_output(("git", *words), cwd=ROOT, encoding="utf-8")

    name = git("rev-parse", "HEAD").strip()
    is_changed = git("status", "--porcelain", "--untracked-files=all")
    return f"{name}-changed" if is_changed else name


def run(name: str, paths: list[str], report: Path) -> bool:
    """Run one group, and return whether it passed; a report says what was found."""
    partial, failed = (report.with_suffix(one) for one in (".partial", ".failed"))
    for path in (report, partial, failed):
        path.unlink(missing_ok=True)
    options = ("--all-cases", "--report", str(partial))
    began = time.monotonic()
    done = subprocess.run(
        (sys.executable, "-m", "pytest", *TWO_PROCESSES, *options, *paths),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    seconds = time.monotonic() - began
    print(f"== {name}: exit {done.returncode} after {seconds:.0f} s", flush=True)
    if not partial.exists():
        return False
    found = json.loads(partial.read_text("utf-8"))
    faults = []
    for test, one in found["tests"].items():
        if setup_of(one) > FIXTURES:
            faults.append(
                f"{test}: its fixtures take more than {FIXTURES:.0f} CPU seconds"
            )
        if one["skipped"]:
            faults.append(f"{test}: skipped")
    for fault in faults:
        print(fault)
    if report.parent.name != commit():
        print("the tree has changed meanwhile: this is no result of it")
        faults.append(name)
    passed = done.returncode == 0 and not faults
    # A group that failed is there for the table; its name makes it run again.
    partial.write_text(json.dumps({**found, "seconds": seconds}), "utf-8")
    partial.rename(report if passed else failed)
    return passed


def setup_of(test: Mapping[str, Any]) -> float:
    """Return the CPU seconds that a test's fixtures took before it began."""
    return float(test.get("setup", 0))


def results(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the reports of a commit, by group."""
    found = {}
    for name in groups():
        for suffix in (".json", ".failed"):
            path = folder / f"{name.replace('/', '-')}{suffix}"
            if path.exists():
                found.setdefault(name, json.loads(path.read_text("utf-8")))
    return found


def lines_of(paths: list[str]) -> int:
    """Count the lines of a group's files."""
    files = [
        file
        for path in paths
        for file in (
            [ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py")
        )
    ]
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


def group_of(test: str) -> str:
    """Return the group that a test is in."""
    names = groups()
    return next(
        name
        for name, paths in names.items()
        if any(test.startswith((f"{path}/", f"{path}::")) for path in paths)
    )


def print_tables(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print what each group has and found, and the trials of each promise."""
    caught: Counter[str] = Counter()
    promises: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for result in found.values():
        for test in result["tests"].values():
            if test.get("caught_by"):
                caught[group_of(test["caught_by"])] += 1
            if "promise" in test:
                sums = promises[tuple(test["promise"])]
                known = (
                    "promise",
                    "failed",
                    "skipped",
                    "cpu",
                    "setup",
                    "why",
                    "caught_by",
                )
                sums.update({"trials": 1, "failures": 0})
                sums.update({k: v for k, v in test.items() if k not in known})
                sums["trials"] -= "trials" in test
                sums["failures"] += test["failed"]
    header = ("lines", "cases", "failed", "CPU s", "bugs", "longest fixtures")
    print(f"{'group':20}", *(f"{one:>8}" for one in header))
    sums = [0] * (len(header) - 1)
    for name, paths in groups().items():
        tests = found.get(name, {"tests": {}, "cpu": 0})
        failed = sum(one["failed"] for one in tests["tests"].values())
        row = [lines_of(paths), len(tests["tests"]), failed, round(tests["cpu"])]
        row.append(caught[name])
        sums = [one + other for one, other in zip(sums, row, strict=True)]
        setup = max(map(setup_of, tests["tests"].values()), default=0)
        print(f"{name:20}", *(f"{one:8}" for one in row), f"{setup:16.1f}")
    lines = sum(len(file.read_text("utf-8").splitlines()) for file in test_files())
    print(f"{'what they share':20}", f"{lines - sums[0]:8}")
    print(f"{'all':20}", *(f"{one:8}" for one in (lines, *sums[1:])))
    minutes = sum(one.get("seconds", 0) for one in found.values()) / 60
    print(f"{minutes:.0f} minutes")
    for (number, words), counts in sorted(
        promises.items(), key=lambda one: (int(one[0][0][1:]), one[0][1])
    ):
        more = [f"{count} {name}" for name, count in counts.items() if name != "trials"]
        more.sort(key=lambda one: one.endswith(" failures"))
        print(f"{number:4} {words:72} {counts['trials']:5} trials, {', '.join(more)}")


def main() -> int:
    """Run what has not passed on this commit; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--record", action="store_true")
    wanted = parser.parse_args()
    folder = RESULTS / commit()
    if wanted.record:
        if missing := groups().keys() - results(folder).keys():
            parser.error(f"not run yet: {', '.join(sorted(missing))}")
        table = recorded([*results(folder).values()])
        TIMES.write_text(json.dumps(table, indent=0) + "\n", "utf-8")
    if wanted.table or wanted.record:
        print_tables(results(folder))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, paths in groups().items():
        report = folder / f"{name.replace('/', '-')}.json"
        is_known = report.exists() and not folder.name.endswith("-changed")
        if not is_known and not run(name, paths, report):
            failed.append(name)
    print_tables(results(folder))
    print(f"failed: {', '.join(failed)}" if failed else "everything passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
