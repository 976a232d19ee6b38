"""The precision of a run is that of the flag, the launcher or the device."""

import pytest
import torch
from dstrain.models import DTYPES, default_device, precision


@pytest.mark.parametrize("mac", [False, True])
@pytest.mark.parametrize("available", [False, True])
def test_a_gpu_is_used_where_there_is_one(
    available: bool, mac: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, found in (("cuda", available), ("backends.mps", mac)):
        monkeypatch.setattr(f"torch.{name}.is_available", lambda found=found: found)
    wanted = "cuda" if available else "mps" if mac else "cpu"
    assert default_device() == torch.device(wanted)


@pytest.mark.parametrize(
    ("flag", "launcher", "device", "wanted"),
    [
        ("no", "bf16", "cuda", "no"),
        ("bf16", "no", "cpu", "bf16"),
        (None, "bf16", "cpu", "bf16"),
        (None, "no", "cuda", "bf16"),
        (None, "fp16", "cpu", "no"),
        (None, None, "cpu", "no"),
        (None, None, "mps 13.6", "no"),
        (None, None, "mps 14.0", "bf16"),
    ],
)
def test_precision_is_the_flags_else_the_launchers_else_the_devices(
    flag: str | None,
    launcher: str | None,
    device: str,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPU of a Mac computes in bf16 from macOS 14 on."""
    name, _, version = device.partition(" ")
    monkeypatch.setattr(
        "torch.backends.mps.is_macos_or_newer",
        lambda *least: float(version) >= least[0],
    )
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if launcher is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    assert precision(flag, torch.device(name)) == wanted
    assert wanted in DTYPES
