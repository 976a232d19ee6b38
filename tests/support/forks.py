"""Children of a test: forks that say where they hang, children of a process that has
one thread only, and Python commands in a fork.
"""

import faulthandler
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from tests.support import ROOT, cpu

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
    used = log.with_suffix(".cpu")
    child = _server().Process(target=_work, args=(work, arguments, log, used))
    child.start()
    child.join()
    code = child.exitcode
    child.close()
    if used.exists():
        cpu.note(float(used.read_text()))
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


def _work(
    work: Callable[..., int], arguments: tuple[object, ...], log: Path, used: Path
) -> None:
    before = cpu.own()
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
        used.write_text(str(cpu.own() - before))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_python(
    command: Sequence[str], check: bool = False, **streams: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a command of Python as `subprocess.run` does, but in a fork of this process.

    What it imports is imported already, which takes a new process seconds. Tests of
    imports, of memory or of how Python ends need a new process.

    Args:
        command: Python's path, then `-c CODE`, `-m MODULE` or a script; or the path of a
            script alone.
        check: Raise CalledProcessError if it fails.
        streams: Where subprocess.run would send the output. It is always captured.
    """
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        child = fork()
        if child == 0:
            _become(command, out.fileno(), err.fileno())
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        for file in (out, err):
            file.seek(0)
        done = subprocess.CompletedProcess(command, code, out.read(), err.read())
    assert code != BROKEN, done.stderr
    if check:
        done.check_returncode()
    return done


def _become(command: Sequence[str], out: int, err: int) -> None:
    """Be a Python that was started with this command, and end as it does."""
    status = BROKEN
    try:
        for own, stream, name in ((1, out, "stdout"), (STDERR, err, "stderr")):
            os.dup2(stream, own)
            # pytest has put its own there.
            setattr(sys, name, os.fdopen(own, "w", buffering=1, closefd=False))
        forget_accelerator()
        first, *words = command
        if first == sys.executable:
            first, *words = words
        sys.argv = [first, *words[1:]] if first == "-c" else [first, *words]
        if first == "-m":
            sys.argv = words
            sys.modules.pop(f"{words[0]}.__main__", None)  # of a test that imports it
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            exec(words[0], {"__name__": "__main__"})  # noqa: S102  # as `python -c` does
        else:
            runpy.run_path(first, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def forget_accelerator() -> None:
    """In a fork: leave what the test's process noted about itself, such as that it is
    alone.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
