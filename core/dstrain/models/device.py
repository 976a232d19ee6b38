"""The device and the dtype that a run computes in."""

import os
from types import MappingProxyType

import torch


def default_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


DTYPES = MappingProxyType({"bf16": torch.bfloat16, "no": torch.float32})
"""The dtype of components that are not trained, by precision."""


def precision(asked: str | None, device: torch.device) -> str:
    """'bf16' or 'no': what is asked for, else the launcher's configuration, else bf16
    on a GPU and none on a CPU.
    """
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
    return asked or ("bf16" if launcher == "bf16" or device.type == "cuda" else "no")
