"""The options of formats and types."""

from typing import ClassVar

from dstrain.plugin import TrainConfig, UsageError, option, options

from dstrain_formats.lora_types import TYPES


@options
class FormatOptions:
    """What trained layers are, and what files of them are called."""

    choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "lora_format": ("comfyui", "diffsynth", "reference"),
        "lora_type": tuple(TYPES),
    }
    adds: ClassVar[dict[str, tuple[str, ...]]] = {
        "lora_files": ("comfyui", "diffsynth", "kohya", "others")
    }
    lokr_factor: int | None = option(
        "LoRA",
        "Rows and columns of the first matrix of a LoKr, in layers that can be divided so. "
        "Defaults to about as many as the second has.",
        affects={"resolved", "LoRA"},
        minimum=1,
    )
    remove_prefix_in_ckpt: str | None = option(
        "output",
        "Save with DiffSynth-Studio's key names. They have no prefix, with any value (pipe.COMPONENT.).",
    )

    def check(self, config: object) -> None:
        """Refuse what would have no effect."""
        if not isinstance(config, TrainConfig):
            return
        if self.lokr_factor is not None and config.lora_type != "lokr":
            raise UsageError("--lokr_factor", "has no effect without --lora_type lokr")
