"""The steps in which a LoRA file is read: `lora.reader` goes through them."""
