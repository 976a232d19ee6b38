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

    @property
    def checkpoints(self) -> bool:
        """Return whether options ask to recompute blocks in the backward pass."""
        return (
            bool(self.use_gradient_checkpointing)
            or self.use_gradient_checkpointing_offload
        )
