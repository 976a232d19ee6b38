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
    timestep_sampling: (
        Literal["shifted", "logit_normal", "mode", "uniform", "sigmoid"] | None
    ) = option(
        "training: loss",
        "Distribution that training timesteps are drawn from: the first three go through the model's "
        "shift, the others do not. Defaults to the variant's.",
        affects={"training", "timestep_sampler"},
    )
    timestep_shift: float | None = option(
        "training: loss",
        "Shift k of the levels of noise that are trained, k s / (1 + (k - 1) s), in place of the model's.",
        affects={"training", "if_given", "timestep_sampler"},
        minimum=0.01,
        maximum=100,
    )
    timestep_mean: float = option(
        "training: loss",
        "Mean of the normal of --timestep_sampling logit_normal and sigmoid; above 0 is noisier.",
        0.0,
        affects={"training", "if_given", "timestep_sampler"},
    )
    timestep_std: float = option(
        "training: loss",
        "Standard deviation of that normal.",
        1.0,
        affects={"training", "if_given", "timestep_sampler"},
        above=0,
    )
    loss_weighting: Literal["bsmntw", "none", "min_snr"] | None = option(
        "training: loss",
        "Weighting of the loss by timestep. Defaults to the variant's.",
        affects={"training", "timestep_sampler"},
    )
    min_snr_gamma: float = option(
        "training: loss",
        "Signal-to-noise ratio from which --loss_weighting min_snr weighs no more.",
        5.0,
        affects={"training", "if_given", "timestep_sampler"},
        above=0,
    )
    loss: Literal["mse", "huber", "mae"] = option(
        "training: loss",
        "How an error of the prediction counts: its square, pseudo-Huber, or its size.",
        "mse",
        affects={"training", "if_given", "loss_options"},
    )
    huber_delta: float = option(
        "training: loss",
        "Error from which --loss huber grows no longer as the square.",
        0.1,
        affects={"training", "if_given", "loss_options"},
        above=0,
        maximum=1000,
    )
    huber_schedule: Literal["constant", "exponential", "snr"] = option(
        "training: loss",
        "How that error depends on the level of noise; the last two begin with 1 where there is none.",
        "constant",
        affects={"training", "if_given", "loss_options"},
    )
    noise_offset: float = option(
        "training: loss",
        "Size of a number that is added to all noise of a channel, so that dark and bright images are learned.",
        0.0,
        affects={"training", "if_given", "loss_options"},
        minimum=0,
        maximum=10,
    )
    input_perturbation: float = option(
        "training: loss",
        "Size of further noise that the denoiser sees and is not asked for.",
        0.0,
        affects={"training", "if_given", "loss_options"},
        minimum=0,
        maximum=10,
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
