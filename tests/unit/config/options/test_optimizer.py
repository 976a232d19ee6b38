"""The options of the optimizer are exactly these, and what each of them affects is frozen."""

from dstrain.config.options import OptimizerOptions

from tests.support.options import options_of

OPTIONS: dict[str, tuple[object, str]] = {
    "customized_optimizer": (None, "resolved"),
    "learning_rate": (None, "training"),
    "loraplus_lr_ratio": (None, "LoRA resolved"),
    "lr_scheduler": ("constant", "training"),
    "lr_scheduler_num_cycles": (None, "resolved"),
    "lr_scheduler_power": (None, "resolved"),
    "lr_warmup_steps": (0, "training"),
    "max_grad_norm": (1.0, "training"),
    "optimizer": ("adamw", "resolved"),
    "optimizer_args": ((), "resolved"),
    "trainable_dtype": ("fp32", "resolved"),
    "weight_decay": (0.01, "training"),
}
"""Name -> default and effects. Stored files are compared by the effects."""


def test_the_options_are_these() -> None:
    assert options_of(OptimizerOptions) == OPTIONS
