"""Processes wait for each other as long as they live, and notice one that does not."""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from dstrain import Diverged, DstrainError, Interrupted, SystemFault
from dstrain.distributed import distributed_run, liveness, should_report
from dstrain.distributed.peers import INTERRUPTED
from torch.distributed import DistNetworkError

from tests.support.processes import (
    Ended,
    in_processes,
    wait_for,
    when_the_others_have_ended,
)

Part = Callable[[int, liveness.Heartbeat], object]
Poke = Callable[[Sequence[int]], None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "INTERVAL", 0.1)


def met(
    folder: Path,
    size: int,
    part: Part,
    timeout: float = 60.0,
    poke: Poke = lambda pids: None,
) -> Ended:
    """The processes' parts in one meeting; exit code 4 for SystemFault."""

    def work(rank: int) -> int:
        here = liveness.Heartbeat(rank, size, timeout)
        try:
            part(rank, here)
        except SystemFault as error:
            os.write(2, f"{error}\n".encode())
            here.leave("failed")
            return error.exit_code
        here.leave()
        return 0

    return in_processes(size, work, folder, launched=False, poke=poke)


def test_nobody_passes_before_all_are_there_again_and_again(tmp_path: Path) -> None:
    def part(rank: int, here: liveness.Heartbeat) -> None:
        for turn in range(3):
            (tmp_path / f"{turn}-{rank}").touch()
            here.wait()
            assert len(list(tmp_path.glob(f"{turn}-*"))) == 3

    assert met(tmp_path, 3, part).codes == (0, 0, 0)


def test_one_that_lives_is_waited_for_as_long_as_it_takes_and_named(
    tmp_path: Path,
) -> None:
    def part(rank: int, here: liveness.Heartbeat) -> None:
        while rank == 1 and "process 1 (" not in waiting_says():
            time.sleep(0.1)
        here.wait()

    def waiting_says() -> str:
        return "".join(path.read_text() for path in tmp_path.glob("said-0-*"))

    ended = met(tmp_path, 2, part, timeout=3)
    assert liveness.TIMEOUT == 10 * 60  # what docs/guide/many-devices.md says
    assert ended.codes == (0, 0), ended.said
    assert "process 0" not in "".join(ended.said)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_process_that_shows_no_life_is_noticed(silent: int, tmp_path: Path) -> None:
    def part(rank: int, here: liveness.Heartbeat) -> None:
        if rank == silent:
            os.kill(os.getpid(), signal.SIGSTOP)
        here.wait()

    resume = when_the_others_have_ended(silent, signal.SIGCONT)
    ended = met(tmp_path, 2, part, 2, resume)
    assert ended.codes == (4, 4)
    assert re.search(rf"process {silent} \(process id \d+ on ", ended.said[1 - silent])
    assert "error: processes: " in ended.said[silent]


def test_a_process_that_is_gone_is_noticed_though_nobody_tells(tmp_path: Path) -> None:
    def part(rank: int, here: liveness.Heartbeat) -> None:
        if rank == 1:
            os._exit(9)
        here.wait()

    assert met(tmp_path, 3, part).codes == (4, 9, 4)


def test_one_that_ends_after_all_have_met_ends_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep, gone = (tmp_path / "asleep-0", tmp_path / "asleep-1"), tmp_path / "gone"

    def part(rank: int, here: liveness.Heartbeat) -> None:
        def sleep(seconds: float) -> None:
            asleep[rank].touch()
            wait_for((gone, asleep[0])[rank])

        slow = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        monkeypatch.setattr(liveness, "time", slow)
        if rank == 0:
            wait_for(asleep[1])
        here.wait()
        if rank == 1:
            here.leave(INTERRUPTED)
            gone.touch()

    assert met(tmp_path, 2, part).codes == (0, 0)


def test_one_that_is_interrupted_within_a_meeting_ends_the_next_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows no longer that all have met, and lives on."""
    asleep, passed, told = (tmp_path / name for name in ("asleep", "passed", "told"))

    def part(rank: int, here: liveness.Heartbeat) -> None:
        def sleep(seconds: float) -> None:
            if rank == 0:
                asleep.touch()
                wait_for(passed)
                raise KeyboardInterrupt

        slow = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        monkeypatch.setattr(liveness, "time", slow)
        if rank == 0:
            with pytest.raises(KeyboardInterrupt):
                here.wait()
            here.leave(INTERRUPTED)
            wait_for(told)
        else:
            wait_for(asleep)
            here.wait()
            passed.touch()
            try:
                with pytest.raises(KeyboardInterrupt):
                    here.wait()
                assert here.peer_ended() == INTERRUPTED
            finally:
                told.touch()

    assert met(tmp_path, 2, part, timeout=5.0).codes == (0, 0)


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
    assert [should_report(Diverged("step 3", "loss nan")) for _ in "ab"] == [True] * 2


GLOO = "[gloo/transport/tcp/pair.cc:547] "
ERRORS = (
    (RuntimeError(f"{GLOO}Connection closed by peer [127.0.0.1]:80"), SystemFault),
    (RuntimeError(f"{GLOO}Timed out waiting 1800000ms for recv"), SystemFault),
    (DistNetworkError("The client socket has failed to connect"), SystemFault),
    (RuntimeError("shapes do not match"), RuntimeError),
)


def test_errors_of_collectives_are_the_end_of_another_process(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        said = []
        for error, kind in ERRORS:
            with pytest.raises(kind) as caught, distributed_run(Accelerator(cpu=True)):
                raise error
            said.append(str(caught.value))
        assert said[0] == said[2] != said[1]

    ended = in_processes(2, work, tmp_path)
    assert ended.codes == (0, 0), ended.said
