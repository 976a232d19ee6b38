"""The configuration of `dstrain generate`."""

from pathlib import Path
from typing import ClassVar

from dstrain.config.conversion import converted, options, required
from dstrain.config.converters import (
    as_inputs,
    as_lora_files,
    as_optional_path,
    as_path,
)
from dstrain.config.fields import option
from dstrain.config.lora_file import LoraFile
from dstrain.config.options.data import OnLongPrompt
from dstrain.config.options.model import ModelChoice
from dstrain.config.value_syntax import NamedInput


@options
class GenerateConfig(ModelChoice):
    """An image or video to generate, as plain data.

    None leaves a value to the family.
    """

    command: ClassVar[str] = "generate"

    height: int | None = option(
        "generation", "Height in pixels; requires --width.", minimum=1, common=True
    )
    width: int | None = option(
        "generation", "Width in pixels; requires --height.", minimum=1, common=True
    )
    prompt: str | None = option("generation", "What to generate.", common=True)
    on_long_prompt: OnLongPrompt = option(
        "generation",
        "What to do with prompts longer than the model takes: stop with an error, or cut them and warn.",
        "truncate",
    )
    negative_prompt: str | None = option("generation", "What to avoid.", common=True)
    guidance_scale: float | None = option(
        "generation", "Scale of classifier-free guidance.", minimum=0, common=True
    )
    num_inference_steps: int | None = option(
        "generation", "Number of denoising steps.", minimum=1, common=True
    )
    sampler: str | None = option(
        "generation",
        "Name of a sampler of the variant, which `dstrain models` lists. Defaults to the published one.",
    )
    denoising_strength: float | None = option(
        "generation",
        "Start from the image or video of --input input_image=FILE or input_video=FILE: the share "
        "of the steps that are taken, above 0 and at most 1. The less, the more of it stays.",
        above=0,
        maximum=1,
    )
    num_frames: int | None = option(
        "generation", "Number of video frames.", minimum=1, common=True
    )
    input: tuple[NamedInput, ...] = converted(
        "generation",
        "Any other input of the variant; for an image or a video, VALUE is a file name. Can be "
        "repeated; repeat a NAME to pass a list.",
        converter=as_inputs,
        default=(),
        common=True,
    )
    run: Path | None = converted(
        "model",
        "Output folder of a training run: use its model files and options, and its newest weights.",
        converter=as_optional_path,
        default=None,
        common=True,
    )
    lora: tuple[LoraFile, ...] = converted(
        "LoRA",
        "LoRA file to apply, with an optional scale. COMPONENT= says what it is for where the "
        "file does not, @alpha=rank or @alpha=NUMBER its alpha; @skip_missing leaves out layers "
        "that the model lacks. Can be repeated.",
        converter=as_lora_files,
        default=(),
        common=True,
    )
    output: Path = required(
        "output",
        "File to write; where a plugin generates several, a folder.",
        converter=as_path,
        common=True,
    )
    overwrite: bool = option(
        "output", "Replace the file --output if it exists.", False, common=True
    )
