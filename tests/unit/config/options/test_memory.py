"""The options of memory are exactly these, and what each of them affects is frozen."""

from dstrain.config.options.memory import MemoryOptions

from tests.support.options import options_of

OPTIONS: dict[str, tuple[object, str]] = {
    "blocks_to_swap": (None, ""),
    "enable_model_cpu_offload": (False, ""),
    "initialize_model_on_cpu": (False, ""),
    "use_gradient_checkpointing": (False, ""),
    "use_gradient_checkpointing_offload": (False, ""),
    "device_memory": (None, "start"),
}
"""Name -> default and effects. Stored files are compared by the effects."""


def test_the_options_are_these() -> None:
    assert options_of(MemoryOptions) == OPTIONS
