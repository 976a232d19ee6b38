"""Types of LoRA layers, each in the module of its name, with its `TYPE`."""

from types import MappingProxyType

TYPES = MappingProxyType(
    {
        "dora": "lora_magnitude_vector",
        "lokr": r"lokr_\w*",
        "loha": r"hada_\w*",
        "oft": "oft_R",
    }
)
"""Name -> pattern of what only its tensors are called by peft."""
