"""How trained networks are sharded, in words."""

import subprocess
import sys

import pytest
from dstrain import UsageError
from dstrain.distributed import Sharding


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        (Sharding(), "sharded over all processes"),
        (Sharding("hybrid"), "sharded over the processes of each machine"),
        (
            Sharding(reshard_after_forward=False, offload=True),
            "sharded over all processes, weights whole from the first forward pass of a "
            "step on, in RAM",
        ),
    ],
)
def test_it_says_what_it_does(sharding: Sharding, words: str) -> None:
    assert str(sharding) == words


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        (Sharding(offload=True), 1),
        (Sharding(), 2),
        (Sharding(reshard_after_forward=False), 3),
    ],
)
def test_it_advises_what_is_not_done_already(sharding: Sharding, words: int) -> None:
    assert len(list(sharding.advice())) == words


def test_hybrid_divides_over_the_processes_of_a_machine() -> None:
    assert Sharding().processes(8, 4) == 8
    assert Sharding("hybrid").processes(8, 4) == 4
    with pytest.raises(UsageError, match="8 processes do not make machines of 3 each"):
        Sharding("hybrid").processes(8, 3)


def test_it_needs_no_torch() -> None:
    code = "import sys, dstrain.distributed.sharding; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
