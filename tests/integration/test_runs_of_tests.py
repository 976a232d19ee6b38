"""A run of tests takes what it should, and notices what it leaves behind."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import ROOT, leftovers
from tests.support.selection import Change

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
    assert len(every) <= 10 * len(tenth)


@pytest.mark.parametrize(
    ("file", "test", "promise", "is_reached"),
    [
        ("core/dstrain/storage/lock.py", "tests/unit/storage/test_a.py", None, True),
        ("core/dstrain/storage/lock.py", "tests/reliability/test_a.py", "R5", True),
        ("core/dstrain/storage/lock.py", "tests/reliability/test_a.py", "R19", False),
        ("core/dstrain/errors.py", "tests/unit/test_errors.py", None, True),
        ("core/dstrain/testing/contract.py", "plugins/wan/tests/test_a.py", None, True),
        ("plugins/wan/dstrain_wan/vae.py", "plugins/wan/tests/test_a.py", None, True),
        ("plugins/wan/dstrain_wan/vae.py", "plugins/flux/tests/test_a.py", None, False),
        ("docs/guide/video.md", "tests/integration/test_docs.py", None, True),
        ("tests/support/once.py", "tests/integration/test_docs.py", None, True),
        ("tests/unit/data/test_a.py", "tests/unit/data/test_a.py", None, True),
    ],
)
def test_what_tests_a_changed_file_is_known(
    file: str, test: str, promise: str | None, is_reached: bool
) -> None:
    marker = SimpleNamespace(args=(promise, "")) if promise else None
    item: Any = SimpleNamespace(
        path=ROOT / test, get_closest_marker=lambda name: marker
    )
    assert Change("HEAD^", frozenset({file})).reaches(item) == is_reached
    change = Change("HEAD^", frozenset({file}), 'name = "known"')
    for name, place, bug_is_reached in (
        *(("known", "other.py", False), ("known", file, True)),
        ("new", "other.py", True),
    ):
        item.callspec = SimpleNamespace(
            params={"bug": SimpleNamespace(name=name, file=place)}
        )
        assert change.reaches(item) == bug_is_reached


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
