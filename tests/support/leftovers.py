"""A run of tests leaves neither a process nor a file of the project behind."""

import os
import re
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from tests.support import ROOT

ENDING = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""Servers of Python that end with the process that they serve. The children of the first
have its command line.
"""
LIMIT = 30.0
"""Seconds in which the last children of a run end by themselves."""
MADE = re.compile(
    r".*(^|/)(__pycache__|\.(pytest|mypy|ruff|import_linter)_cache|\.hypothesis)/.*"
    r"|\.(venv|results|golden|dstrain-tests-[^/]*)/.*"
)
"""Files that Python and tools keep for the next run, and a run's own temporary ones."""


def files() -> frozenset[str]:
    """Return what lies in the project's folder beside its tracked files; nothing in a copy
    that git does not know.
    """
    if not (ROOT / ".git").exists():
        return frozenset()
    command = ("git", "ls-files", "--others")
    return frozenset(
        line
        for line in subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
        if not MADE.fullmatch(line)
    )


def processes() -> Iterator[psutil.Process]:
    """Yield the children of this process, and those that have lost their parent: all have
    this run's folder of temporary files.
    """
    children = psutil.Process().children(recursive=True)
    yield from children
    for process in psutil.process_iter():
        try:
            place = process.environ().get("TMPDIR")
        except psutil.Error:
            continue
        is_own = process.pid == os.getpid() or process in children
        if place == os.environ["TMPDIR"] and not is_own:
            yield process


def command(process: psutil.Process) -> str:
    """Return a process's command; none if it is one of `ENDING` that still serves this
    run, or has ended.
    """
    try:
        words = " ".join(process.cmdline())
        above = process.parents()
        served = " ".join(above[0].cmdline()) if above else ""
    except psutil.Error:
        return ""
    is_server = any(name in words for name in ENDING) and words != served
    return "" if is_server and psutil.Process() in above else words


class Leftovers:
    """What the process that starts and ends a run looks for."""

    def __init__(self) -> None:
        self.before = files()
        self.found: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        found = {one: words for one in processes() if (words := command(one))}
        _, left = psutil.wait_procs(found, timeout=LIMIT)
        for process in left:
            self.found.append(f"process {found[process]}")
            process.kill()
        self.found += [f"file {line}" for line in sorted(files() - self.before)]
        if self.found:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        for line in self.found:
            terminalreporter.write_line(f"left behind: {line}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    # The folder's name has the process that made it (conftest.py).
    if f"-{os.getpid()}-" in os.environ["TMPDIR"]:
        config.pluginmanager.register(Leftovers(), "leftovers")
