"""The options of memory are exactly these, and what each of them affects is frozen."""

from typing import Any

import pytest
from dstrain.config.options.memory import MemoryOptions

from tests.support.options import options_of

OPTIONS: dict[str, tuple[object, str]] = {
    "blocks_to_swap": (None, ""),
    "enable_model_cpu_offload": (False, ""),
    "initialize_model_on_cpu": (False, ""),
    "use_gradient_checkpointing": (None, ""),
    "use_gradient_checkpointing_offload": (False, ""),
    "device_memory": (None, "start"),
}
"""Name -> default and effects. Stored files are compared by the effects."""


def test_the_options_are_these() -> None:
    assert options_of(MemoryOptions) == OPTIONS


@pytest.mark.parametrize(
    ("flags", "swaps", "checkpoints"),
    [
        ({}, False, False),
        ({"use_gradient_checkpointing": True}, False, True),
        ({"use_gradient_checkpointing_offload": True}, False, True),
        ({"blocks_to_swap": 1}, True, True),
        ({"enable_model_cpu_offload": True}, True, True),
    ],
)
def test_offloading_and_swapping_imply_checkpointing(
    flags: dict[str, Any], swaps: bool, checkpoints: bool
) -> None:
    options = MemoryOptions(**flags)
    assert (options.swaps_blocks, options.checkpoints) == (swaps, checkpoints)
