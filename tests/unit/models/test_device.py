"""The precision of a run is that of the flag, the launcher or the device."""

import pytest
import torch
from dstrain.models import DTYPES, default_device, precision

CPU, GPU, MAC = (torch.device(name) for name in ("cpu", "cuda", "mps"))


@pytest.mark.parametrize("mac", [False, True])
@pytest.mark.parametrize("available", [False, True])
def test_a_gpu_is_used_where_there_is_one(
    available: bool, mac: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, found in (("cuda", available), ("backends.mps", mac)):
        monkeypatch.setattr(f"torch.{name}.is_available", lambda found=found: found)
    assert default_device() == (GPU if available else MAC if mac else CPU)


@pytest.mark.parametrize(("version", "wanted"), [((13, 6), "no"), ((14, 0), "bf16")])
def test_the_gpu_of_a_mac_computes_in_bf16_from_macos_14_on(
    version: tuple[int, int], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(
        "torch.backends.mps.is_macos_or_newer", lambda *least: version >= least
    )
    assert precision(None, MAC) == wanted
    assert precision("bf16", MAC) == "bf16"


@pytest.mark.parametrize(
    ("flag", "launcher", "device", "wanted"),
    [
        ("no", "bf16", GPU, "no"),
        ("bf16", "no", CPU, "bf16"),
        (None, "bf16", CPU, "bf16"),
        (None, "no", GPU, "bf16"),
        (None, "fp16", CPU, "no"),
        (None, None, GPU, "bf16"),
        (None, None, CPU, "no"),
    ],
)
def test_precision_is_the_flags_else_the_launchers_else_the_devices(
    flag: str | None,
    launcher: str | None,
    device: torch.device,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if launcher is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    assert precision(flag, device) == wanted
    assert wanted in DTYPES
