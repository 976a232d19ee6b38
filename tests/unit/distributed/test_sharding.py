"""How trained networks are divided, in words."""

import subprocess
import sys

import pytest
from dstrain.distributed.sharding import Sharding


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        (Sharding(), "divided over all processes"),
        (Sharding("hybrid"), "divided over the processes of each machine"),
        (
            Sharding(reshard_after_forward=False, offload=True),
            "divided over all processes, weights whole from the first forward pass of a "
            "step on, in RAM",
        ),
    ],
)
def test_it_says_what_it_does(sharding: Sharding, words: str) -> None:
    assert str(sharding) == words


def test_it_needs_no_torch() -> None:
    code = "import sys, dstrain.distributed.sharding; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
