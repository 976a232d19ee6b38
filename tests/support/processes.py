"""Runs of several processes: forks of the test, which find each other and reduce
through gloo as launched ones do.

The test is the launcher: like torchrun, it keeps the rendezvous store, and
ends all when one has failed.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from dstrain.cli.main import main
from torch.distributed import TCPStore

from tests.support.forks import forget_accelerator, fork

LIMIT = 240.0
"""Seconds after which processes that still run count as hung: they are aborted, and each
writes the stacks of its threads."""
PORT_BYTES = 2


@dataclass(frozen=True)
class Ended:
    """How the processes ended: exit codes by rank (-9 for kill -9), and what
    each wrote to its stderr.
    """

    codes: tuple[int, ...]
    said: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The first lines of errors, of all processes."""
        return [
            line
            for text in self.said
            for line in text.splitlines()
            if line.startswith("dstrain: error: ")
        ]


def words(flags: Mapping[str, Any]) -> list[str]:
    """Flags as words of a command line; None is left out, True is a bare flag."""
    given = [(f"--{name}", value) for name, value in flags.items() if value is not None]
    return [
        word
        for name, value in given
        for word in ([name] if value is True else [name, str(value)])
    ]


def in_processes(
    size: int,
    work: Callable[[int], object],
    folder: Path,
    launched: bool = True,
    poke: Callable[[Sequence[int]], None] = lambda pids: None,
) -> Ended:
    """Work in so many processes, each given its rank; what one returns, if a number, is
    its exit code.

    With `launched`, the others get SIGTERM when one has failed. `poke` is called with
    the processes' ids at once.
    """
    files = [folder / f"said-{rank}-{time.monotonic_ns()}" for rank in range(size)]
    start = time.monotonic()
    # The store's thread looks up the names of those who connect. A child that is forked
    # meanwhile inherits the resolver's lock, held for ever: so all are forked before.
    gate = reading, writing = os.pipe()
    pids = [
        _forked(rank, size, gate, files[rank], work, launched) for rank in range(size)
    ]
    store = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=LIMIT),
    )
    os.write(writing, store.port.to_bytes(PORT_BYTES) * size)
    os.close(reading)
    os.close(writing)
    poke(pids)
    codes: dict[int, int] = {}
    ended = False
    while len(codes) < size:
        for rank, pid in enumerate(pids):
            if rank not in codes and (status := os.waitpid(pid, os.WNOHANG)) != (0, 0):
                codes[rank] = os.waitstatus_to_exitcode(status[1])
        late = time.monotonic() - start > LIMIT
        if late or (launched and not ended and any(codes.values())):
            ended = True
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    os.kill(pid, signal.SIGABRT if late else signal.SIGTERM)
                    if late:  # one that is stopped ends, too
                        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
    del store
    return Ended(
        tuple(codes[rank] for rank in range(size)),
        tuple(file.read_text() for file in files),
    )


def wait_for(path: Path) -> None:
    """Wait until another process has made a file."""
    while not path.exists():
        time.sleep(0.01)


def when_the_others_have_ended(
    rank: int, number: int
) -> Callable[[Sequence[int]], None]:
    """Send a process a signal once the others have ended."""

    def poke(pids: Sequence[int]) -> None:
        def send() -> None:
            for pid in pids:
                if pid != pids[rank]:
                    with suppress(ChildProcessError):
                        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            with suppress(ProcessLookupError):
                os.kill(pids[rank], number)

        threading.Thread(target=send).start()

    return poke


def commands(*lines: Sequence[str]) -> Callable[[int], int]:
    """Work that runs these command lines of dstrain one after the other, until one
    fails; the last exit code.
    """

    def work(rank: int) -> int:
        return next((code for line in lines if (code := main(line))), 0)

    return work


def _forked(
    rank: int,
    size: int,
    gate: tuple[int, int],
    said: Path,
    work: Callable[[int], object],
    launched: bool,
) -> int:
    pid = fork()
    if pid:
        return pid
    code = 99
    try:
        reading, writing = gate
        os.close(writing)
        port = int.from_bytes(os.read(reading, PORT_BYTES))
        sys.stderr = said.open("w", buffering=1)
        os.dup2(sys.stderr.fileno(), 2)
        faulthandler.enable(sys.stderr)
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        forget_accelerator()
        made = work(rank)
        code = made if isinstance(made, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
