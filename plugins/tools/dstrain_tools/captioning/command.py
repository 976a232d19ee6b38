"""Define `dstrain caption`; what imports torch is imported when it runs."""

from pathlib import Path
from typing import Any

import click
from dstrain.plugin import TrainConfig
from dstrain.plugin.commands import (
    Command,
    file_path,
    flags_by_name,
    interrupt_on_signals,
    shared_options,
)

from dstrain_tools.captioning.options import QUANTIZE_CHOICES, CaptionOptions

DEFAULTS = CaptionOptions(folder=Path())


def caption(**values: Any) -> None:
    """Write a caption beside each image and video in FOLDER, with a model that reads images.

    A caption is NAME.txt, as datasets are read. Images that have one are left alone, so
    that the same command resumes where it was interrupted.
    """
    from dstrain_tools.captioning.run import run

    with interrupt_on_signals():
        run(CaptionOptions(**values))


def command() -> click.Command:
    """Return the command."""
    at_least_1 = click.IntRange(min=1)
    of_training = flags_by_name(TrainConfig)
    options = (
        _option(
            "model_id",
            "Model: a published id, ID or ID@REVISION, or a folder. Qwen-Image's text encoder "
            "is a Qwen2.5-VL; any other image-to-text model of transformers can be named.",
        ),
        _option(
            "hub",
            "Hub to download missing model files from. Defaults to that of the variable "
            "DSTRAIN_DOWNLOAD_SOURCE, else to modelscope.",
            type=click.Choice(of_training["hub"].choices),
        ),
        _option(
            "prompt",
            "What the model is asked. Defaults to a description of what is seen, for models "
            "that follow instructions; others caption without being asked.",
        ),
        _option("trigger_word", "Word to put before captions that do not contain it."),
        _option("caption_prefix", "Text to put before each caption, as it is."),
        _option("caption_suffix", "Text to put after each caption, as it is."),
        _option("overwrite", "Replace captions that exist.", is_flag=True),
        _option(
            "dry_run",
            "List what would be captioned, and stop: needs no model.",
            is_flag=True,
        ),
        _option("max_new_tokens", "Most tokens of a caption.", type=at_least_1),
        _option(
            "temperature",
            "Draw tokens at this temperature. 0 always takes the most probable one.",
            type=click.FloatRange(min=0),
        ),
        _option(
            "seed",
            "Random seed, with --temperature.",
            type=click.IntRange(0, 2**63 - 1),
        ),
        _option("batch_size", "Images to caption at once.", type=at_least_1),
        _option(
            "max_pixels",
            "Scale larger images down to this many pixels; frames of a video share them.",
            type=at_least_1,
        ),
        _option(
            "num_frames",
            "Frames of a video to show to the model, evenly spaced.",
            type=at_least_1,
        ),
        _option(
            "mixed_precision",
            "Compute dtype. Defaults to bf16 on a GPU and no (fp32) on a CPU.",
            type=click.Choice(of_training["mixed_precision"].choices),
        ),
        _option(
            "quantize",
            "Keep the language model's weights in fewer bytes by this method.",
            type=click.Choice(QUANTIZE_CHOICES),
        ),
        _option(
            "device",
            "Device of torch, such as cuda:1 or cpu. Defaults to the GPU if there is one.",
        ),
    )
    folder = click.Argument(["folder"], type=file_path, metavar="FOLDER")
    params = [folder, *options, *shared_options()]
    return Command("caption", callback=caption, help=caption.__doc__, params=params)


def _option(name: str, text: str, **settings: Any) -> click.Option:
    default = getattr(DEFAULTS, name)
    # A default that is nothing is not shown.
    shown = default not in (None, "", False)
    return click.Option(
        [f"--{name}"], default=default, show_default=shown, help=text, **settings
    )
