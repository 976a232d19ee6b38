"""A run of tests takes what it should, and notices what it leaves behind."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import ROOT, leftovers

TRIALS = "tests/reliability/test_r05_damaged_cache.py"


def collected(*options: str) -> set[str]:
    """The trials of a promise that a run takes."""
    command = (sys.executable, "-m", "pytest", "--collect-only", "-p", "no:xdist")
    done = subprocess.run(
        (*command, *options, TRIALS), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_a_tenth_of_a_table_always_runs_and_as_many_more_as_fit() -> None:
    tenth, some, every = (
        collected(*options) for options in ((), ("--seconds", "60"), ("--all-cases",))
    )
    assert tenth < some <= every
    assert len(every) / 20 < len(tenth) < len(every) / 5


def test_a_process_that_is_left_is_seen_also_if_a_server_has_forked_it() -> None:
    context = multiprocessing.get_context("forkserver")
    forked = context.Process(target=time.sleep, args=(1000,))
    forked.start()
    with subprocess.Popen(
        ("tee",), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as alone:
        assert alone.stdin and alone.stdout
        alone.stdin.write(b"a")
        alone.stdin.flush()
        assert alone.stdout.read(1)  # until it answers, it may have no command yet
        left = {one.pid for one in leftovers.processes() if leftovers.command(one)}
        alone.kill()
    forked.kill()
    forked.join()
    assert {forked.pid, alone.pid} <= left
    assert os.getpid() not in left


LEAVES = """
import subprocess, multiprocessing, pathlib

AWAY = "import os, time; os.fork() or (os.setsid(), time.sleep(1000))"

def test_a():
    subprocess.run(("setsid", "-f", "sleep", "1000"))
    served = multiprocessing.get_context("forkserver").Process(target=exec, args=(AWAY,))
    served.start()
    served.join()
    pathlib.Path("left-behind").touch()
"""
HANGS = """
import re

def test_a():
    re.match(r"(a+)+b", "a" * 64)
"""
SKIPS = """
import pytest
pytest.skip("not here", allow_module_level=True)
"""


def run_of(text: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a file of tests as the Makefile does, in the project's folder."""
    (folder / "test_of_a_run.py").write_text(text)
    command = (sys.executable, "-m", "pytest", "-p", "conftest", "-n", "1")
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    # It is a run of its own, not part of this one.
    environment.pop("PYTEST_XDIST_WORKER", None)
    place = ("--rootdir", ROOT, "-c", ROOT / "pyproject.toml")
    return subprocess.run(
        (*command, *place, *options, folder / "test_of_a_run.py"),
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.drawn
def test_a_run_that_leaves_something_behind_fails_and_names_it(tmp_path: Path) -> None:
    try:
        done = run_of(LEAVES, tmp_path)
    finally:
        (ROOT / "left-behind").unlink(missing_ok=True)
    assert done.returncode == 1, done.stdout
    said = [line for line in done.stdout.splitlines() if "left behind" in line]
    kinds = ["file left-behind", "process sleep 1000", "multiprocessing.forkserver"]
    assert [any(kind in line for line in said) for kind in kinds] == [True] * 3


def test_what_holds_pythons_lock_forever_ends_and_is_named(tmp_path: Path) -> None:
    done = run_of(HANGS, tmp_path, "--timeout", "2")
    assert done.returncode == 1
    assert "::test_a" in done.stdout
    assert "in test_a" in done.stderr


def test_a_file_that_skips_itself_is_in_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run_of(SKIPS, tmp_path, "--report", str(report))
    tests = json.loads(report.read_text())["tests"]
    assert [one["skipped"] for one in tests.values()] == [True]


def test_a_file_that_is_left_is_seen_though_git_ignores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "ROOT", tmp_path)
    subprocess.run(("git", "init", "-q", tmp_path), check=True)
    (tmp_path / ".gitignore").write_text("out/\n")
    for name in (
        "out/a",
        "feature_cache/b",
        "a/__pycache__/c",
        ".venv/d",
        ".dstrain-tests-1-x/e",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert leftovers.files() == {".gitignore", "out/a", "feature_cache/b"}
