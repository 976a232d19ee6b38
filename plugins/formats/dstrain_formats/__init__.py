"""LoRA files of other programs, and other types of LoRA layers."""
