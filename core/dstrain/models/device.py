"""Choose the device, the dtype and the attention of a run."""

import os
from types import MappingProxyType

import torch

from dstrain.errors import UsageError
from dstrain.lazy import import_name

DTYPES = MappingProxyType({"bf16": torch.bfloat16, "no": torch.float32})
"""Precision -> the dtype of components that are not trained."""
ATTENTION = "DIFFUSERS_ATTN_BACKEND"
"""Variable that names what computes the attention of networks of diffusers."""
NATIVE_ATTENTION = "native"
"""Its default: torch's own."""


def default_device() -> torch.device:
    """Return the GPU if there is one, of CUDA or of a Mac, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def usable_device(asked: torch.device | str | None, where: str) -> torch.device:
    """Return a device, by default `default_device`; raises UsageError, about `where`, if
    there is none such here.
    """
    try:
        device = torch.device(asked) if asked else default_device()
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        what = f"{asked!r} cannot be used here: {reason}"
        raise UsageError(where, what) from error
    return device


def precision(asked: str | None, device: torch.device) -> str:
    """Return 'bf16' or 'no': what is asked for, else bf16 if the launcher's
    configuration says so or on a GPU that computes in it.
    """
    if asked:
        return asked
    computes = device.type == "cuda"
    if device.type == "mps":  # those of Macs do from macOS 14 on
        computes = torch.backends.mps.is_macos_or_newer(14, 0)
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
    return "bf16" if launcher == "bf16" or computes else "no"


def attention_backend() -> dict[str, str]:
    """Return the variable of another attention than torch's own, if it is set; raises
    UsageError for one that cannot be used here.
    """
    name = os.environ.get(ATTENTION, NATIVE_ATTENTION)
    if name == NATIVE_ATTENTION:
        return {}
    module = "diffusers.models.attention_dispatch"  # its import may refuse the name
    try:
        # It tries what the variable alone would not before the first step.
        with import_name(module, "attention_backend")(name):
            return {ATTENTION: name}
    except Exception as error:
        raise UsageError(ATTENTION, f"{name!r} cannot be used: {error}") from error
