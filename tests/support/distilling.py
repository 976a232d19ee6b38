"""What the model of a project has generated for a student of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain import generate

from tests.support.generating import generation
from tests.support.runs import project

PROMPTS = ("dog", "two dogs on a bridge", "cat", "dog and cat", "a", "")


def distillable(
    folder: Path, steps: tuple[int, ...] = (2, 2, 1, 2, 2, 1), **teacher: Any
) -> Path:
    """A project whose own model has made the images and trajectories below `made`, for
    students of so many steps.
    """
    project(folder)
    rows = [
        {"prompt": prompt, "seed": seed, "num_inference_steps": count}
        for seed, (prompt, count) in enumerate(zip(PROMPTS, steps, strict=True))
    ]
    table = folder / "prompts.json"
    table.write_text(json.dumps(rows))
    given = {"num_inference_steps": 5, "height": 16, "width": 16, **teacher}
    teaching = generation(folder / "model", folder / "made", dataset=table, **given)
    generate(replace(teaching, trajectory=True))
    return folder
