"""The options of `dstrain caption`, as plain data; imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from dstrain.plugin.commands import Hub, Precision

MODEL_ID = "Qwen/Qwen-Image"
"""Whose text encoder is a whole Qwen2.5-VL, which users of that family have already."""
QUANTIZE_CHOICES = ("fp8", "int8_block", "bitsandbytes_nf4")
"""The methods of dstrain that suit a language model."""


@dataclass(frozen=True, kw_only=True)
class CaptionOptions:
    """What to caption, with which model, and what is written."""

    folder: Path
    model_id: str = MODEL_ID
    """A folder, or a published id: ID or ID@REVISION."""
    hub: Hub | None = None
    prompt: str | None = None
    """What the model is asked; None for the default of its kind."""
    trigger_word: str = ""
    caption_prefix: str = ""
    caption_suffix: str = ""
    overwrite: bool = False
    dry_run: bool = False
    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 takes the most probable token each time."""
    seed: int | None = None
    """The seed by which tokens are drawn; None for 0."""
    batch_size: int = 1
    max_pixels: int = 1048576
    """The most pixels of an image, or of all frames of a video together."""
    num_frames: int = 8
    """Frames of a video that the model is shown."""
    mixed_precision: Precision | None = None
    quantize: str | None = None
    """One of QUANTIZE_CHOICES."""
    device: str | None = None
    """A device of torch; None for the GPU if there is one."""
    disabled_plugins: tuple[str, ...] = ()
