"""The options of LoRA training."""

from pathlib import Path

from dstrain.config.conversion import converted, options
from dstrain.config.converters import as_commas, as_optional_path
from dstrain.config.fields import option

DEFAULT_RANK = 32
"""The rank of layers for which no rank is given."""


@options
class LoraOptions:
    """The LoRA layers that a run trains or starts from."""

    lora_base_model: str | None = option(
        "LoRA",
        "Components to add LoRA to, comma-separated.",
        affects={"resolved", "LoRA"},
        common=True,
    )
    lora_target_modules: str | None = converted(
        "LoRA",
        "Module names to add LoRA to, comma-separated. Defaults to the family's list.",
        converter=as_commas,
        default=None,
        affects={"resolved", "LoRA"},
    )
    lora_rank: int | str = option(
        "LoRA",
        "LoRA rank, or ranks of the layers that patterns match: 16,ff=8 or attn=32,ff=8. "
        "A pattern is a dotted part of a layer's name, or its beginning.",
        DEFAULT_RANK,
        affects={"resolved", "LoRA"},
        minimum=1,
        common=True,
    )
    lora_alpha: float | str | None = option(
        "LoRA",
        "LoRA alpha; the layers are scaled by alpha / rank. Defaults to the rank. Takes patterns as --lora_rank does.",
        affects={"resolved", "LoRA"},
        above=0,
    )
    lora_type: str = option(
        "LoRA",
        "What is trained of a layer's weight: a change of low rank (lora), or what a plugin adds.",
        "lora",
        affects={"resolved", "LoRA"},
        choices=("lora",),
        hook="dstrain_lora_types",
    )
    lora_dropout: float = option(
        "LoRA",
        "Dropout of the input of LoRA layers, in training alone.",
        0.0,
        affects={"resolved", "LoRA"},
        minimum=0,
        below=1,
    )
    lora_checkpoint: Path | None = converted(
        "LoRA",
        "LoRA file to start training from; @alpha=rank or @alpha=NUMBER at its end is its alpha, where it states none.",
        converter=as_optional_path,
        default=None,
        affects={"LoRA", "weights"},
        common=True,
    )
    preset_lora_path: Path | None = converted(
        "LoRA",
        "LoRA file to merge into the weights before training, written as for --lora of "
        "generate; @training_only leaves it out of all that is generated.",
        converter=as_optional_path,
        default=None,
        affects={"weights"},
    )
    preset_lora_model: str | None = option(
        "LoRA", "Components to merge --preset_lora_path into, comma-separated."
    )
