"""The options of validation are exactly these, and what each of them affects is frozen."""

from dstrain.config.options.validation import ValidationOptions

from tests.support.options import options_of

OPTIONS: dict[str, tuple[object, str]] = {
    "validation_dataset_base_path": (None, "timestep_sampler"),
    "validation_dataset_metadata_path": (None, ""),
    "validation_split": (None, "resolved timestep_sampler"),
    "validation_steps": (None, ""),
}
"""Name -> default and effects. Stored files are compared by the effects."""


def test_the_options_are_these() -> None:
    assert options_of(ValidationOptions) == OPTIONS
