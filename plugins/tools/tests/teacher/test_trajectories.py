"""Trajectories: the latents that a teacher passed through, at the sigmas of a student's
steps.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from dstrain import Pipeline, UsageError, generate
from dstrain.pipeline import seeded_noise
from dstrain.storage import verify_file
from dstrain.training.losses import LATENTS, SIGMAS
from safetensors.torch import load_file
from torch import Tensor

from tests.support.generating import generation, rows_of

TEACHER = 4


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_a_file_has_the_teachers_latents_at_the_sigmas_of_the_students_steps(
    steps: int, pipe: Pipeline, model: Path, tmp_path: Path
) -> None:
    """Bit for bit where the teacher was at that sigma; on a line between, elsewhere."""
    row = {"prompt": "dog", "seed": 3, "num_inference_steps": f" {steps}"}
    (tmp_path / "prompts.json").write_text(json.dumps([row]))
    config = generation(
        model,
        tmp_path / "set",
        dataset=tmp_path / "prompts.json",
        trajectory=True,
        num_inference_steps=TEACHER,
    )
    generate(config)
    path = config.output / rows_of(config.output)[0]["trajectory"]
    verify_file(path)
    found = load_file(path)

    states: list[Tensor] = []
    pipe(
        prompt="dog",
        seed=3,
        num_inference_steps=TEACHER,
        on_step=lambda _, latents: states.append(latents),
    )
    states.insert(0, seeded_noise(states[0].shape, 3))
    schedule, tokens = pipe.spec.schedule, 4
    passed = list(zip(schedule.sigmas(TEACHER, tokens), states, strict=True))
    wanted = schedule.sigmas(steps, tokens)
    assert torch.equal(found[SIGMAS], wanted[None])
    assert found[LATENTS].shape == (1, steps + 1, *states[0].shape[1:])
    for latents, sigma in zip(found[LATENTS][0], wanted, strict=True):
        exact = [state for at, state in passed if at == sigma]
        if exact:
            assert torch.equal(latents, exact[0][0])
            continue
        for (above, start), (below, end) in pairwise(passed):
            if above > sigma > below:
                share = ((above - sigma) / (above - below)).item()
                between = start + share * (end - start)
                torch.testing.assert_close(latents, between[0])


@pytest.mark.usefixtures("tiny")
def test_rows_without_a_number_of_steps_are_refused(
    model: Path, tmp_path: Path
) -> None:
    steps = [4, "", 0, "few"]
    rows = [{"prompt": "a", "seed": 1, "num_inference_steps": one} for one in steps]
    table = tmp_path / "prompts.json"
    table.write_text(json.dumps(rows))
    with pytest.raises(UsageError) as caught:
        generate(generation(model, tmp_path / "set", dataset=table, trajectory=True))
    places = [line.split(": ")[0] for line in caught.value.help_lines]
    assert places[:3] == [
        f"prompts.json:{row}:num_inference_steps" for row in (2, 3, 4)
    ]
