"""The options of lora are exactly these, and what each of them affects is frozen."""

from dstrain.config.options import LoraOptions

from tests.support.options import options_of

OPTIONS: dict[str, tuple[object, str]] = {
    "lokr_factor": (None, "LoRA resolved"),
    "lora_alpha": (None, "LoRA resolved"),
    "lora_base_model": (None, "LoRA resolved"),
    "lora_checkpoint": (None, "LoRA weights"),
    "lora_dropout": (0.0, "LoRA resolved"),
    "lora_rank": (32, "LoRA resolved"),
    "lora_target_modules": (None, "LoRA resolved"),
    "lora_type": ("lora", "LoRA resolved"),
    "preset_lora_model": (None, ""),
    "preset_lora_path": (None, "weights"),
}
"""Name -> default and effects. Stored files are compared by the effects."""


def test_the_options_are_these() -> None:
    assert options_of(LoraOptions) == OPTIONS
