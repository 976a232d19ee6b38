"""The options of what is trained, for how long, and with how much memory."""

from typing import Literal

from dstrain.config.conversion import converted, options
from dstrain.config.converters import as_commas
from dstrain.config.fields import option


@options
class TrainingOptions:
    """What is trained, for how long and how."""

    trainable_models: str | None = converted(
        "training",
        "Components (or submodules, such as dit.blocks.3) to train in full, comma-separated.",
        converter=as_commas,
        default=None,
        affects={"resolved"},
        common=True,
    )
    ema_decay: float | None = option(
        "training",
        "Average what is trained over the steps, keeping this share of the average at each (0.9 to 0.9999). "
        "Saved beside the weights; what is generated during training shows it.",
        above=0,
        below=1,
    )
    num_epochs: int | None = option(
        "training",
        "Number of epochs. Defaults to 1 unless --max_steps is set.",
        affects={"length"},
        minimum=1,
        common=True,
    )
    max_steps: int | None = option(
        "training",
        "Stop after this many optimizer steps, or after --num_epochs, whichever comes first.",
        affects={"length"},
        minimum=1,
        common=True,
    )
    batch_size: int = option(
        "training",
        "Batch size per device.",
        1,
        affects={"resolved", "recipe"},
        minimum=1,
        common=True,
    )
    gradient_accumulation_steps: int = option(
        "training",
        "Number of batches per optimizer step.",
        1,
        affects={"resolved", "recipe"},
        minimum=1,
        common=True,
    )
    timestep_sampling: Literal["shifted", "logit_normal", "uniform", "mode"] = option(
        "training: loss",
        "Distribution that training timesteps are drawn from.",
        "shifted",
        affects={"training", "timestep_sampler"},
    )
    loss_weighting: Literal["bsmntw", "none"] = option(
        "training: loss",
        "Weighting of the loss by timestep.",
        "bsmntw",
        affects={"training", "timestep_sampler"},
    )
    min_timestep_boundary: float | None = option(
        "training: loss",
        "Lower end of the training timestep range, as a fraction of the schedule (0 = noisiest). "
        "Defaults to the expert's range.",
        affects={"training", "timestep_sampler"},
        minimum=0,
        maximum=1,
    )
    max_timestep_boundary: float | None = option(
        "training: loss",
        "Upper end of the training timestep range. Defaults to the expert's range.",
        affects={"training", "timestep_sampler"},
        minimum=0,
        maximum=1,
    )
    find_unused_parameters: bool = option(
        "training",
        "Let DistributedDataParallel search for parameters without a gradient.",
        False,
    )


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
