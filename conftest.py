"""What all tests of core and plugins need: no network is used, only servers that tests start
(see `hub_server`), and nothing that a shell, a user or a CI has set changes a result.
"""

import atexit
import faulthandler
import gc
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dstrain.console import logging_to_stderr

ROOT = Path(__file__).parent
LEAST_SPACE = 2 * 2**30
"""Bytes that the files of a run of all tests may need."""
INHERITED = re.compile(
    r"CI|BUILD_NUMBER|GITHUB_ACTIONS|TF_BUILD"
    r"|TERM|COLUMNS|FORCE_COLOR|NO_COLOR|PY_COLORS"
    r"|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|(LC|DSTRAIN|DIFFSYNTH|DIFFUSERS|ACCELERATE|HF|MODELSCOPE|WANDB|SWANLAB|XDG|GIT|PIP)_.*"
    r"|(?i:\w+_proxy)|PYTHON(WARNINGS|OPTIMIZE|HASHSEED|UTF8)|\w+_(TOKEN|KEY)"
)
"""Variables of a CI, a terminal, a launcher, a network and the libraries. With one of the first two,
pytest shows the whole difference of two files, which takes hours.
"""


def _place() -> str:
    """Make the folder of all temporary files of this run: in the project, if the system's
    has no space left.
    """
    system = tempfile.gettempdir()
    has_space = shutil.disk_usage(system).free >= LEAST_SPACE
    prefix = f".dstrain-tests-{os.getpid()}-"
    return tempfile.mkdtemp(prefix=prefix, dir=system if has_space else ROOT)


def _normalize() -> None:
    """Forget what this process has inherited."""
    # A shell starts background jobs with SIGINT and SIGQUIT ignored, and nohup with SIGHUP.
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    for name in filter(INHERITED.fullmatch, [*os.environ]):
        del os.environ[name]
    os.environ |= {"LANG": "C.UTF-8", "DSTRAIN_SKIP_DOWNLOAD": "True"}
    if "PYTEST_XDIST_WORKER" not in os.environ:
        place = _place()
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        os.environ |= {"TMPDIR": place, "HOME": place}
    tempfile.tempdir = None
    # Nothing is remembered from one process of tests to another.
    os.environ["DSTRAIN_CACHE"] = tempfile.mkdtemp(prefix="cache-")


_normalize()

# Tests kill processes, which loses nothing that was written; only a machine that dies loses
# what is not on its disk. A run waits for the disk about 30 times, a quarter of its time.
# That it does, and in which order, tests see that put their own function here.
os.fsync = lambda descriptor: None

pytest_plugins = [
    "tests.support.selection",
    "tests.support.leftovers",
    "tests.support.fixtures",
]


def pytest_configure() -> None:
    """Let an alarm print all stacks, where a process of pytest-xdist prints, and end it."""
    stderr = os.dup(2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, stderr, all_threads=True, chain=True)


def pytest_timeout_set_timer(settings: Any) -> bool:
    """Set an alarm in the place of pytest-timeout's thread, which a test that holds Python's
    lock stops; no fork inherits it.
    """
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


def pytest_timeout_cancel_timer() -> bool:
    """Stop the alarm."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    return True


@pytest.fixture(autouse=True)
def lines_on_stderr() -> Iterator[None]:
    """Show what a run logs on stderr, where tests read it as its user does."""
    with logging_to_stderr():
        yield


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave what has been imported out of the collector's sight, after each file's tests.

    A run collects garbage several times, and looks through the millions of objects of
    libraries each time.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
