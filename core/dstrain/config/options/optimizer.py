"""The options of the optimizer and of its learning rates."""

from typing import Literal

from dstrain.config.conversion import converted, options
from dstrain.config.converters import as_texts
from dstrain.config.fields import option
from dstrain.config.named_optimizers import OPTIMIZERS, NamedOptimizer

ENDING_AT_LAST_STEP = ("linear", "cosine", "polynomial", "cosine_with_restarts", "rex")
"""Learning rate schedules whose every value depends on how many steps the run has."""
POLYNOMIAL_END = 1e-7
"""The learning rate at which `polynomial` ends."""
OWN_RATES = "".join(
    f", for {name} to {one.learning_rate:g}"
    for name, one in OPTIMIZERS.items()
    if one.learning_rate != NamedOptimizer.learning_rate
)


def ends_at_last_step(schedule: str) -> bool:
    """Return whether every value of a schedule depends on how many steps the run has; one
    that is named by its path may use them.
    """
    return schedule in ENDING_AT_LAST_STEP or "." in schedule


@options
class OptimizerOptions:
    """How gradients change the weights."""

    learning_rate: float | str | None = option(
        "training: optimizer",
        "Learning rate, or one for each trained component: dit=1e-4,text_encoder=1e-5; a number "
        f"before these is for the others. Defaults to 1e-4{OWN_RATES}.",
        affects={"training"},
        above=0,
        common=True,
    )
    lr_scheduler: str = option(
        "training",
        "Learning rate schedule; or the dotted path of a function of the step, of all steps and "
        "of those of the warm-up, which returns the factor of the learning rates.",
        "constant",
        affects={"training"},
        choices=("constant", "constant_with_warmup", *ENDING_AT_LAST_STEP),
        is_open=True,
    )
    lr_warmup_steps: int = option(
        "training: optimizer",
        "Number of warmup steps, over which the learning rate rises from 0.",
        0,
        affects={"training"},
        minimum=0,
    )
    lr_scheduler_num_cycles: int | None = option(
        "training: optimizer",
        "Number of cosines of --lr_scheduler cosine_with_restarts. Defaults to 1.",
        affects={"resolved"},
        minimum=1,
    )
    lr_scheduler_power: float | None = option(
        "training: optimizer",
        "Exponent of --lr_scheduler polynomial. Defaults to 1, which is linear.",
        affects={"resolved"},
        above=0,
    )
    weight_decay: float = option(
        "training: optimizer", "Weight decay.", 0.01, affects={"training"}, minimum=0
    )
    max_grad_norm: float = option(
        "training: optimizer",
        "Maximum gradient norm; larger gradients are clipped. 0 clips none.",
        1.0,
        affects={"training"},
        minimum=0,
    )
    optimizer: str = option(
        "training: optimizer",
        f"Optimizer: {', '.join(OPTIMIZERS)}, or the dotted path of a class.",
        "adamw",
        affects={"resolved"},
        common=True,
    )
    customized_optimizer: str | None = option(
        "training: optimizer",
        "Dotted path of an optimizer; the same as --optimizer.",
        affects={"resolved"},
    )
    optimizer_args: tuple[str, ...] = converted(
        "training: optimizer",
        "Arguments of the optimizer, such as betas=0.9,0.95 eps=1e-6. Can be repeated.",
        converter=as_texts,
        default=(),
        affects={"resolved"},
        several=True,
    )
    loraplus_lr_ratio: float | None = option(
        "LoRA",
        "LoRA+: the B matrices of LoRA layers learn at so many times the learning rate.",
        affects={"LoRA", "resolved"},
        above=0,
    )
    trainable_dtype: Literal["fp32", "bf16"] = option(
        "memory",
        "Precision of trained weights; bf16 ones have no copy in fp32, and updates are rounded up or down by chance.",
        "fp32",
        affects={"resolved"},
    )
