"""Toys of families, and what their pipelines make."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from dstrain import Pipeline
from dstrain.registry import load_family
from dstrain.testing.rows import write_rows
from torch import Tensor

from tests.support.once import once


def toy(family: str, variant: str) -> Path:
    """Return the folder of a variant's toy, to be read or copied."""
    write = load_family(family).load("toy")
    return once(f"{family}-{variant}", lambda folder: write(folder, variant))


def dataset(family: str, variant: str) -> Path:
    """Return a folder of rows that have every column of a variant."""
    spec = load_family(family).spec(variant)
    return once(f"{family}-{variant}-data", lambda folder: write_rows(spec, folder))


def opened(family: str, variant: str, dtype: torch.dtype = torch.float32) -> Pipeline:
    """Return a fresh pipeline of a variant's toy."""
    return Pipeline.from_pretrained(
        toy(family, variant), variant=variant, torch_dtype=dtype
    )


def sharpened(pipe: Pipeline) -> Pipeline:
    """Let a denoiser listen to its conditions, which a new one hardly does; return its
    pipeline.
    """
    with torch.no_grad():
        for weight in pipe.components["dit"].parameters():
            weight.mul_(2 if weight.ndim > 1 else 1)
    return pipe


def run_unit(pipe: Pipeline, name: str, **inputs: Any) -> dict[str, Any]:
    """Return what a unit or a decoder makes of these inputs."""
    units = {one.name: one for one in (*pipe.spec.units, *pipe.spec.decoders)}
    latents = {key: inputs.pop(key) for key in ("latents",) if key in inputs}
    return units[name].run(inputs, pipe.bind_components(units[name]), **latents)


def gradients(
    pipe: Pipeline,
    trained: Collection[str],
    values: Mapping[str, Any],
    latents: Tensor,
    timestep: Tensor,
) -> dict[str, Tensor]:
    """Return the gradients that these components get from one prediction."""
    for name in trained:
        pipe.components[name].requires_grad_(True).zero_grad(set_to_none=True)
    pipe.predict(values, latents, timestep).float().square().mean().backward()
    return {
        f"{name}.{key}": weight.grad
        for name in trained
        for key, weight in pipe.components[name].named_parameters()
        if weight.grad is not None
    }
