"""LoRA layers and their files."""
