"""Trajectories: the latents that a teacher passed through, at the sigmas of a student's
steps.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import UsageError
from dstrain.data import Table
from dstrain.generation.trajectories import student_steps, write_trajectory
from dstrain.plugin import FlowMatchSchedule
from dstrain.storage import verify_file
from dstrain.training import LATENTS, SIGMAS
from safetensors.torch import load_file

SCHEDULE = FlowMatchSchedule(shift=1.0, latents_per_token=1)


def table(*rows: dict[str, Any]) -> Table:
    return Table(
        Path("prompts.csv"), tuple(rows[0]), rows, tuple(range(2, len(rows) + 2))
    )


def test_each_row_says_how_many_steps_its_student_has() -> None:
    rows = [{"num_inference_steps": " 4"}, {"num_inference_steps": "2"}]
    assert student_steps(table(*rows)) == [4, 2]


def test_a_table_or_rows_without_a_number_of_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="has no column 'num_inference_steps'"):
        student_steps(table({"prompt": "dog"}))
    bad = [{"num_inference_steps": text} for text in ("4", "", "0", "few")]
    with pytest.raises(UsageError, match="3 bad values") as caught:
        student_steps(table(*bad))
    reasons = [line.partition("steps: ")[2] for line in caught.value.help_lines]
    assert reasons[0] == "is blank"
    assert reasons[1] == "expected 1 or more, got 0"
    assert reasons[2].startswith("'few' is not an integer")


def test_a_file_has_the_latents_at_the_sigmas_of_the_students_steps(
    tmp_path: Path,
) -> None:
    """Four steps of equal length to two, whose states are among them, and to three,
    whose states lie between.
    """
    states = [torch.full((1, 2, 2, 2), float(10 - i)) for i in range(5)]
    for steps, expected in ((2, [10, 8, 6]), (3, [10, 26 / 3, 22 / 3, 6])):
        path = tmp_path / f"{steps}.safetensors"
        write_trajectory(path, SCHEDULE, states, steps)
        found = load_file(path)
        assert found[LATENTS].shape == (1, steps + 1, 2, 2, 2)
        assert found[LATENTS][0, :, 0, 0, 0].tolist() == pytest.approx(expected)
        assert torch.equal(found[SIGMAS], SCHEDULE.sigmas(steps, 4)[None])
        verify_file(path)
