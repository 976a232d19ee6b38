"""What the proofs of a format and of a type of LoRA add to the options of dstrain."""

from typing import ClassVar

from dstrain.plugin import options


@options
class LoraChoices:
    """Nothing of their own: values alone."""

    choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "lora_format": ("studio",),
        "lora_type": ("hra",),
    }
