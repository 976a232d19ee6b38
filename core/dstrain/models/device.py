"""Choose the device and the dtype of a run."""

import os
from types import MappingProxyType

import torch

DTYPES = MappingProxyType({"bf16": torch.bfloat16, "no": torch.float32})
"""Precision -> the dtype of components that are not trained."""


def default_device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def precision(asked: str | None, device: torch.device) -> str:
    """Return 'bf16' or 'no': what is asked for, else bf16 if the launcher's
    configuration says so or on a GPU.
    """
    if asked:
        return asked
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
    return "bf16" if launcher == "bf16" or device.type == "cuda" else "no"
