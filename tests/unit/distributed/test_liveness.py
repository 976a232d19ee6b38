"""Processes wait for each other as long as they live, notice one that does not, and say
once why they end.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain import Diverged, DstrainError, Interrupted, SystemFault
from dstrain.console import logging_to_stderr
from dstrain.distributed import liveness as heartbeat, should_report
from dstrain.distributed.liveness import ENDED, LATE, Heartbeat, peer_failure
from torch.distributed import DistNetworkError

from tests.support.processes import Ended, in_processes

Part = Callable[[int, Heartbeat], object]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.05)


def met(folder: Path, size: int, part: Part, timeout: float = 60.0) -> Ended:
    """The processes' parts in one meeting; exit code 4 for SystemFault."""

    def work(rank: int) -> int:
        here = Heartbeat(rank, size, timeout)
        try:
            part(rank, here)
        except SystemFault as error:
            os.write(2, f"{error}\n".encode())
            here.leave(heartbeat.FAILED)
            return error.exit_code
        here.leave()
        return 0

    return in_processes(size, work, folder, launched=False)


def test_nobody_passes_before_all_are_there_again_and_again(tmp_path: Path) -> None:
    def part(rank: int, here: Heartbeat) -> None:
        for turn in range(3):
            time.sleep(0.05 * ((rank + turn) % 3))
            (tmp_path / f"{turn}-{rank}").touch()
            here.wait()
            assert len(list(tmp_path.glob(f"{turn}-*"))) == 3

    assert met(tmp_path, 3, part).codes == (0, 0, 0)


def test_waiting_takes_as_long_as_the_others_live(tmp_path: Path) -> None:
    def part(rank: int, here: Heartbeat) -> None:
        time.sleep(4 if rank == 0 else 0)
        here.wait()

    ended = met(tmp_path, 2, part, timeout=2)
    assert ended.codes == (0, 0), ended.said


@pytest.mark.parametrize("silent", [0, 1])
def test_a_process_that_gives_no_sign_of_life_is_noticed(
    silent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = Heartbeat._beat
    monkeypatch.setattr(
        Heartbeat,
        "_beat",
        lambda self, cache: None if self.rank == silent else beat(self, cache),
    )

    def part(rank: int, here: Heartbeat) -> None:
        time.sleep(4 if rank == silent else 0)
        here.wait()

    ended = met(tmp_path, 2, part, timeout=2)
    assert ended.codes == (4, 4)
    named = (
        rf"process {silent} \(process id \d+ on .+\) has not responded for 2 seconds"
    )
    assert re.search(named, ended.said[1 - silent])
    assert f"processes: {ENDED}" in ended.said[silent]


def hang(seconds: float = 5.0, stopped: bool = False) -> None:
    """Hang, until killed."""
    own = os.getpid()
    if not os.fork():
        time.sleep(seconds)
        os.kill(own, signal.SIGKILL)
        os._exit(0)
    if stopped:
        os.kill(own, signal.SIGSTOP)
    time.sleep(60)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("hung", [0, 1])
def test_a_process_that_does_not_come_to_the_others_is_named_and_they_exit(
    hung: int, stopped: bool, tmp_path: Path
) -> None:
    """The others are where no exception reaches them."""

    def part(rank: int, here: Heartbeat) -> None:
        with here.together():
            pass
        if rank == hung and not stopped:
            hang()
        with here.together():
            if rank == hung:
                hang(stopped=True)
            time.sleep(60)

    ended = met(tmp_path, 3, part, timeout=2)
    assert [code for rank, code in enumerate(ended.codes) if rank != hung] == [4, 4]
    assert ended.codes[hung] == -9
    named = rf"processes: the others have waited 2 seconds for process {hung} \(process id \d+ on [^,]+\)\n"
    assert sum(len(re.findall(named, said)) for said in ended.said) == 1, ended.said


def test_a_process_that_hangs_before_it_begins_is_named(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            hang()
        with Heartbeat(rank, 2, timeout=1).together():
            time.sleep(60)

    ended = in_processes(2, work, tmp_path, launched=False)
    assert ended.codes == (4, -9)
    assert "waited 1 seconds for process 1, which has not begun" in ended.said[0]
    assert ended.seconds < 20


def test_nobody_is_named_where_all_have_come_or_one_alone_takes_long(
    tmp_path: Path,
) -> None:
    def part(rank: int, here: Heartbeat) -> None:
        with here.together():
            time.sleep(3)
        time.sleep(3)
        with here.together():
            here.wait()

    ended = met(tmp_path, 2, part, timeout=1)
    assert (ended.codes, ended.said) == ((0, 0), ("", ""))


def test_who_is_waited_for_is_said_while_it_lives(tmp_path: Path) -> None:
    def part(rank: int, here: Heartbeat) -> None:
        if rank == 1:
            time.sleep(3)
        with logging_to_stderr():
            here.wait()

    ended = met(tmp_path, 2, part, timeout=1)
    assert ended.codes == (0, 0)
    assert re.search(r"waiting for 1 seconds for process 1 \(", ended.said[0])
    assert "process 0" not in "".join(ended.said)


def test_a_process_that_is_gone_is_noticed_though_nobody_tells(tmp_path: Path) -> None:
    def part(rank: int, here: Heartbeat) -> None:
        if rank == 1:
            os._exit(9)
        here.wait()

    ended = met(tmp_path, 3, part)
    assert ended.codes == (4, 9, 4)
    assert ended.seconds < 10


def test_several_that_end_for_one_reason_say_it_once(tmp_path: Path) -> None:
    def say(failure: DstrainError) -> None:
        if should_report(failure):
            os.write(2, f"{failure}\n".encode())

    def work(rank: int) -> None:
        say(Diverged("step 3", "loss nan"))
        say(Diverged("step 4", f"seen by {rank}"))
        say(Interrupted("dstrain", "interrupted"))

    ended = in_processes(3, work, tmp_path)
    lines = sorted(line.removeprefix("dstrain: error: ") for line in ended.lines)
    assert lines == [
        "step 3: loss nan",
        *(f"step 4: seen by {rank}" for rank in range(3)),
    ]


def test_a_process_alone_always_says_why_it_ends() -> None:
    failure = Diverged("step 3", "loss nan")
    assert should_report(failure)
    assert should_report(failure)


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:80"
            ),
            ENDED,
        ),
        (
            RuntimeError(
                "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"
            ),
            LATE,
        ),
        (DistNetworkError("The client socket has failed to connect"), ENDED),
        (RuntimeError("shapes do not match"), ""),
        (ValueError("gloo"), ""),
    ],
    ids=["closed", "late", "network", "another", "no RuntimeError"],
)
def test_errors_of_collectives_are_distinguished_from_others(
    error: Exception, meaning: str
) -> None:
    assert peer_failure(error) == meaning
