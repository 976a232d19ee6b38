"""Store the latents that a teacher passes through, for a student that learns to pass
through them in fewer steps.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from dstrain import TRAJECTORY_IMITATION, UsageError
from dstrain.data import Fault, Table, read_literal
from dstrain.generation import LATENTS, SIGMAS, inference_sigmas
from dstrain.plugin import Column, FlowMatchSchedule
from dstrain.plugin.lora import write_tensors
from torch import Tensor

STUDENT_STEPS = "num_inference_steps"
"""The column with the number of the student's steps."""


def student_steps(table: Table) -> list[int]:
    """Return the number of the student's steps of each row.

    Raises UsageError for a table without this column, and for rows where it is not such
    a number.
    """
    column = TRAJECTORY_IMITATION.inputs[STUDENT_STEPS]
    assert isinstance(column, Column)
    if column.name not in table.columns:
        what = f"has no column {column.name!r}, the number of the student's steps, for --trajectory"
        raise UsageError(table.path, what)
    steps = []
    faults = []
    for number, row in enumerate(table.rows):
        try:
            cell = read_literal(row[column.name], column)
            if cell is None:
                raise ValueError("is blank")
            steps.append(cell.literal)
        except ValueError as error:
            faults.append(Fault(number, column.name, str(error)))
    if faults:
        table.refuse(faults)
    return steps


def write_trajectory(
    path: Path, schedule: FlowMatchSchedule, states: Sequence[Tensor], steps: int
) -> None:
    """Write the latents at the sigmas of a student's steps; see `training.distill`.

    Args:
        path: The safetensors file.
        schedule: The sigmas of any number of steps.
        states: The teacher's latents, (1, channels, ...) fp32: the initial noise, then
            those after each of its steps.
        steps: The number of the student's steps.
    """
    taken = inference_sigmas(schedule, states[0], len(states) - 1)
    wanted = inference_sigmas(schedule, states[0], steps)
    points = _points_on_path(states, taken, wanted)
    tensors = {LATENTS: torch.stack(points, dim=1), SIGMAS: wanted[None]}
    write_tensors(path, tensors, {}, checksum=True)


def _points_on_path(
    states: Sequence[Tensor], taken: Tensor, wanted: Tensor
) -> list[Tensor]:
    """Return the latents at the wanted sigmas of a path whose states are at the taken
    ones; both descend from 1 to 0.

    Euler's steps are straight in sigma, so that the path is known between its states,
    too, and what the sampler was at is returned as it is.
    """
    points = []
    for sigma in wanted:
        after = int((taken > sigma).sum())
        if sigma == taken[after]:
            points.append(states[after])
            continue
        start, end = taken[after - 1], taken[after]
        share = (start - sigma) / (start - end)
        points.append(torch.lerp(states[after - 1], states[after], share.item()))
    return points
