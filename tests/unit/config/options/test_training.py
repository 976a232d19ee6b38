"""The options of training are exactly these, and what each of them affects is frozen."""

from dstrain.config.options.training import TrainingOptions

from tests.support.options import options_of

OPTIONS: dict[str, tuple[object, str]] = {
    "batch_size": (1, "recipe resolved"),
    "ema_decay": (None, ""),
    "compile": (False, "resolved"),
    "find_unused_parameters": (False, ""),
    "gradient_accumulation_steps": (1, "recipe resolved"),
    "loss_weighting": ("bsmntw", "timestep_sampler training"),
    "max_steps": (None, "length"),
    "max_timestep_boundary": (None, "timestep_sampler training"),
    "min_timestep_boundary": (None, "timestep_sampler training"),
    "num_epochs": (None, "length"),
    "timestep_sampling": ("shifted", "timestep_sampler training"),
    "trainable_models": (None, "resolved"),
}
"""Name -> default and effects. Stored files are compared by the effects."""


def test_the_options_are_these() -> None:
    assert options_of(TrainingOptions) == OPTIONS
