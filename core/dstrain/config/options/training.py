"""The options of the optimization."""

from dataclasses import dataclass
from typing import Literal

from dstrain.config.fields import option

ENDING_AT_LAST_STEP = ("linear", "cosine")
"""Learning rate schedules whose every value depends on how many steps the run has."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What is trained, for how long and how."""

    trainable_models: str | None = option(
        "training",
        "Components (or submodules, such as dit.blocks.3) to train in full, comma-separated.",
        affects={"resolved"},
    )
    learning_rate: float = option(
        "training",
        "Learning rate.",
        1e-4,
        affects={"training"},
        above=0,
    )
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine"] = (
        option(
            "training",
            "Learning rate schedule.",
            "constant",
            affects={"training"},
        )
    )
    lr_warmup_steps: int = option(
        "training",
        "Number of warmup steps, over which the learning rate rises from 0.",
        0,
        affects={"training"},
        minimum=0,
    )
    weight_decay: float = option(
        "training",
        "Weight decay of AdamW.",
        0.01,
        affects={"training"},
        minimum=0,
    )
    max_grad_norm: float = option(
        "training",
        "Maximum gradient norm; larger gradients are clipped.",
        1.0,
        affects={"training"},
        above=0,
    )
    num_epochs: int | None = option(
        "training",
        "Number of epochs. Defaults to 1 unless --max_steps is set.",
        affects={"length"},
        minimum=1,
    )
    max_steps: int | None = option(
        "training",
        "Stop after this many optimizer steps, or after --num_epochs, whichever comes first.",
        affects={"length"},
        minimum=1,
    )
    batch_size: int = option(
        "training",
        "Batch size per device.",
        1,
        affects={"resolved", "recipe"},
        minimum=1,
    )
    gradient_accumulation_steps: int = option(
        "training",
        "Number of batches per optimizer step.",
        1,
        affects={"resolved", "recipe"},
        minimum=1,
    )
    timestep_sampling: Literal["shifted", "logit_normal", "uniform", "mode"] = option(
        "training",
        "Distribution that training timesteps are drawn from.",
        "shifted",
        affects={"training", "timestep_sampler"},
    )
    loss_weighting: Literal["bsmntw", "none"] = option(
        "training",
        "Weighting of the loss by timestep.",
        "bsmntw",
        affects={"training", "timestep_sampler"},
    )
    min_timestep_boundary: float | None = option(
        "training",
        "Lower end of the training timestep range, as a fraction of the schedule (0 = noisiest). "
        "Defaults to the expert's range.",
        affects={"training", "timestep_sampler"},
        minimum=0,
        maximum=1,
    )
    max_timestep_boundary: float | None = option(
        "training",
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
