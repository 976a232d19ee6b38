"""The options that trade time or precision for memory."""

from dstrain.config.conversion import options
from dstrain.config.fields import option


@options
class MemoryOptions:
    """How much memory a run needs, and where."""

    initialize_model_on_cpu: bool = option(
        "memory",
        "Has no effect: no more than one weight of a model is in RAM while it is loaded.",
        False,
    )
    use_gradient_checkpointing: bool | None = option(
        "memory",
        "Recompute activations in the backward pass instead of storing them. By default, families "
        "whose models need it do so, and the start of the run says it.",
        common=True,
    )
    use_gradient_checkpointing_offload: bool = option(
        "memory",
        "Offload checkpointed activations to RAM (implies --use_gradient_checkpointing).",
        False,
    )
    blocks_to_swap: int | None = option(
        "memory",
        "Keep the frozen weights of the last N blocks of each trained network in RAM, and on "
        "the device only while they compute (implies --use_gradient_checkpointing).",
        minimum=1,
        common=True,
    )
    enable_model_cpu_offload: bool = option(
        "memory",
        "Keep the frozen weights of all blocks in RAM, as --blocks_to_swap does for some.",
        False,
    )

    @property
    def swaps_blocks(self) -> bool:
        """Return whether weights of blocks wait in RAM."""
        return self.enable_model_cpu_offload or self.blocks_to_swap is not None

    @property
    def checkpoints(self) -> bool:
        """Return whether blocks are recomputed in the backward pass."""
        return (
            bool(self.use_gradient_checkpointing)
            or self.use_gradient_checkpointing_offload
            or self.swaps_blocks
        )
