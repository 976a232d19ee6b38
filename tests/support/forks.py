"""Children of a test: forks that say where they hang, and children of a process that has
one thread only.
"""

import faulthandler
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch

from tests.support import ROOT

LIMIT = 200.0
"""Seconds after which a child counts as hung; less than a test may take."""
STDERR = 2
ZERO = 10
"""The exit code of a child whose function returned 0; a child that hung ends with 1."""
BROKEN = 99
"""The exit code of a child that raised."""


def fork() -> int:
    """Fork, and return 0 in the child, which computes with one thread.

    A child that lives too long writes its stacks to its stderr and ends: it may have
    inherited a lock that another thread of the test's process held, and a parent that
    waits for it shows nothing.
    """
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=STDERR)
    return child


def in_clean_child(work: Callable[..., int], *arguments: object, log: Path) -> int:
    """Return what a function of a module returns in a child that inherits no lock and no
    imported family; what is printed there goes to `log`.

    The child is forked by a server that has imported the libraries and has no second
    thread.
    """
    child = _server().Process(target=_work, args=(work, arguments, log))
    child.start()
    child.join()
    code = child.exitcode
    child.close()
    assert code in range(ZERO, BROKEN), (code, log.read_text()[-3000:])
    return code - ZERO


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.families_libraries"])
    # The server is another Python, which looks for its modules in what it is told.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    try:
        context.Process(target=int).start()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _work(work: Callable[..., int], arguments: tuple[object, ...], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), STDERR)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=STDERR)
    status = BROKEN
    try:
        status = ZERO + work(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
