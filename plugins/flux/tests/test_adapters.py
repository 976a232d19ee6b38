"""Networks beside the denoiser: recomputed with its blocks, gone after a call, and refused
where they are another denoiser's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import UsageError
from dstrain_flux import MODEL
from dstrain_flux.adapters import predict_ipadapter
from dstrain_flux.networks import FluxIPAdapter
from dstrain_flux.toy import write
from torch import Tensor, nn


@pytest.fixture
def parts(tmp_path: Path, opened: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The components that an IP-Adapter's step has."""
    write(tmp_path, "ip-adapter")
    loaded = opened(tmp_path)
    return {"dit": loaded["dit"], "ipadapter": loaded["ipadapter"]}


def step(parts: dict[str, Any], branch: str = "positive", **given: Any) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    shapes = {
        "noisy_latents": (2, 16, 4, 4),
        "prompt_emb": (2, 5, 32),
        "pooled_emb": (2, 32),
        "image_embs": (2, 2, 32),
    }
    values: dict[str, Any] = {
        name: torch.randn(shape, generator=draw) for name, shape in shapes.items()
    }
    values["timestep"] = torch.tensor([400.0, 700.0])
    return predict_ipadapter(**{**values, **given}, **parts, branch=branch)


@pytest.mark.parametrize("trained", ["dit", "ipadapter"])
def test_gradient_checkpointing_changes_no_gradient(
    trained: str, parts: dict[str, Any]
) -> None:
    network: nn.Module = parts[trained].requires_grad_(True)
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            parts["dit"].enable_gradient_checkpointing()
        network.zero_grad(set_to_none=True)
        step(parts).square().mean().backward()
        found.append({name: one.grad for name, one in network.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient is not None and gradient.any(), name
        assert torch.equal(gradient, found[1][name]), name


def test_a_call_leaves_nothing_in_the_denoiser(parts: dict[str, Any]) -> None:
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    step(parts)
    for module in parts["dit"].modules():
        assert not any(getattr(module, kind) for kind in hooks)


def test_images_count_by_the_scale_and_not_in_the_negative_branch(
    parts: dict[str, Any],
) -> None:
    made, others = step(parts), {"image_embs": torch.ones(2, 2, 32)}
    assert not torch.equal(step(parts, **others), made)
    off = step(parts, ipadapter_scale=0.0)
    assert torch.equal(step(parts, ipadapter_scale=0.0, **others), off)
    negative = step(parts, "negative")
    assert torch.equal(step(parts, "negative", **others), negative)
    assert not torch.equal(negative, off)


def test_an_ip_adapter_for_another_number_of_blocks_is_refused(
    parts: dict[str, Any],
) -> None:
    parts["ipadapter"] = FluxIPAdapter(32, 24, 32, 3, num_blocks=4)
    with pytest.raises(UsageError, match="for 4 blocks, and the denoiser has 3"):
        step(parts)


def test_defaults_are_the_published_numbers() -> None:
    assert MODEL.spec("ip-adapter").defaults["ipadapter_scale"] == 1.0
