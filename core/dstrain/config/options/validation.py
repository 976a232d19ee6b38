"""The options of validation."""

from pathlib import Path

from dstrain.config.conversion import as_optional_path, converted, options
from dstrain.config.fields import option


@options
class ValidationOptions:
    """The rows that are not trained on, and when their loss is computed."""

    validation_split: float | None = option(
        "training: validation",
        "Fraction of the rows that are not trained on; their loss is logged. They are chosen by --seed.",
        affects={"resolved", "timestep_sampler"},
        above=0,
        below=1,
        common=True,
    )
    validation_dataset_base_path: Path | None = converted(
        "training: validation",
        "A second dataset, of any form, which is not trained on; its loss is logged.",
        converter=as_optional_path,
        default=None,
        affects={"timestep_sampler"},
    )
    validation_dataset_metadata_path: Path | None = converted(
        "training: validation",
        "Metadata file of the second dataset. Defaults to what is in --validation_dataset_base_path.",
        converter=as_optional_path,
        default=None,
    )
    validation_steps: int | None = option(
        "training: validation",
        "Compute the validation loss every N steps. Defaults to whenever weights are saved.",
        minimum=1,
    )
