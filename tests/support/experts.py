"""The family `tiny` with a denoiser of two experts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from dstrain.plugin import ExpertSchedule

from tests.support import family


def let_tiny_have_experts(patch: pytest.MonkeyPatch) -> None:
    """Let `dit` be for the noisier half of the timesteps, and another expert, `dit2` in
    the folder transformer_2, for the other.
    """
    spec = replace(
        family.BASE,
        components=("dit", "dit2", "text_encoder", "vae", "tokenizer"),
        experts=ExpertSchedule("dit", {"dit": (500.0, 1000.0), "dit2": (0.0, 500.0)}),
    )
    dit, *others = family.COMPONENTS
    expert = replace(dit, name="dit2", folder="transformer_2")
    patch.setattr(family, "COMPONENTS", (dit, expert, *others))
    patch.setitem(family.PIPELINES, "base", spec)
    other = replace(spec, denoiser_config={"depth": 1})
    patch.setitem(family.PIPELINES, "other", other)


def copied_denoiser(model: Path, place: Path) -> list[str]:
    """A copy of a model's denoiser in a folder of this name."""
    shutil.copytree(model / "transformer", place)
    return sorted(map(str, place.glob("*.safetensors")))
