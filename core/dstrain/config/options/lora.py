"""The options of LoRA training."""

from dataclasses import dataclass
from pathlib import Path

from dstrain.config.fields import option


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """The LoRA layers that a run trains or starts from."""

    lora_base_model: str | None = option(
        "LoRA",
        "Component to add LoRA to.",
        affects={"resolved", "LoRA"},
    )
    lora_target_modules: str | None = option(
        "LoRA",
        "Module names to add LoRA to, comma-separated. Defaults to the family's list.",
        affects={"resolved", "LoRA"},
    )
    lora_rank: int = option(
        "LoRA",
        "LoRA rank.",
        32,
        affects={"resolved", "LoRA"},
        minimum=1,
    )
    lora_alpha: float | None = option(
        "LoRA",
        "LoRA alpha; the layers are scaled by alpha / rank. Defaults to the rank.",
        affects={"resolved", "LoRA"},
        above=0,
    )
    lora_checkpoint: Path | None = option(
        "LoRA",
        "LoRA file to start training from.",
        affects={"LoRA", "weights"},
    )
    preset_lora_path: Path | None = option(
        "LoRA",
        "LoRA file to merge into the weights before training (differential LoRA training).",
        affects={"weights"},
    )
    preset_lora_model: str | None = option(
        "LoRA",
        "Component to merge --preset_lora_path into.",
    )
