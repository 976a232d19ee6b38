"""The options of checkpoints and weights files."""

from pathlib import Path

from dstrain.config.conversion import converted, options
from dstrain.config.converters import as_optional_path
from dstrain.config.fields import option


@options
class OutputOptions:
    """Checkpoints and weights files."""

    output_path: Path | None = converted(
        "output",
        "Folder for checkpoints and logs.",
        converter=as_optional_path,
        default=None,
        common=True,
    )
    lora_format: str | None = option(
        "output",
        "Program whose key names saved LoRA, or full weights, have. Defaults to diffusers.",
        choices=("diffusers",),
        hook="dstrain_lora_formats",
    )
    save_steps: int | None = option(
        "checkpoints",
        "Save every N steps. Defaults to the end of each epoch.",
        minimum=1,
        common=True,
    )
    keep_checkpoints: int | None = option(
        "checkpoints",
        "Keep only the newest N checkpoints. Defaults to all weights and the 2 newest training states.",
        minimum=1,
        common=True,
    )
    resume: str | None = option(
        "checkpoints",
        "Resume from the newest checkpoint, or start training if there is none (auto), or resume from the one at PATH.",
        affects={"start"},
        bare="auto",
        common=True,
    )
    resume_from_checkpoint: Path | None = converted(
        "checkpoints",
        "Saved weights to start a new run from, at step 0 and with a new optimizer.",
        converter=as_optional_path,
        default=None,
        affects={"weights"},
    )
    overwrite: bool = option(
        "checkpoints",
        "Delete the run in --output_path and start a new one there.",
        False,
        affects={"start"},
        common=True,
    )
