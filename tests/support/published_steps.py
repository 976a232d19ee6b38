"""Compare a published pipeline's latents after each step with ours."""

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from dstrain.testing.compare import EXACT
from torch import Tensor

AtStepEnd = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]
"""A `callback_on_step_end` of diffusers."""


def add_to(
    passed: list[Tensor], change: Callable[[Tensor], Tensor] = lambda latents: latents
) -> AtStepEnd:
    """Return a callback that adds the latents after each step to a list.

    Args:
        passed: The list.
        change: What is done to the latents before.
    """

    def at_step_end(
        pipeline: Any, step: int, timestep: Any, values: dict[str, Any]
    ) -> dict[str, Any]:
        passed.append(change(values["latents"]))
        return values

    return at_step_end


def assert_equal_steps(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], steps: int
) -> None:
    """Compare the latents after each of so many steps."""
    differences = [
        (one - other).abs().max().item()
        for one, other in zip(ours, theirs, strict=True)
    ]
    assert len(differences) == steps
    assert max(differences) <= EXACT, differences


def encode_the_mode(patch: pytest.MonkeyPatch, *pipelines: ModuleType) -> None:
    """Let pipelines take the mode of the VAE's distribution, as in training, of which they
    take a sample.
    """
    for module in pipelines:
        patch.setattr(
            module,
            "retrieve_latents",
            lambda encoded, generator: encoded.latent_dist.mode(),
        )


def without_ftfy(patch: pytest.MonkeyPatch, *pipelines: ModuleType) -> None:
    """Let pipelines leave letters as they are: they call ftfy though it is absent."""
    for module in pipelines:
        patch.setattr(module, "ftfy", SimpleNamespace(fix_text=str), raising=False)
