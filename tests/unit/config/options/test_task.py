"""The task of a run is one option, which may name a stage."""

import pytest
from dstrain.config.options.task import TaskChoice

from tests.support.options import options_of


def test_the_option_is_this() -> None:
    assert options_of(TaskChoice) == {"task": ("sft", "recipe")}


@pytest.mark.parametrize(
    ("task", "name", "stage"),
    [("sft", "sft", ""), ("sft:data_process", "sft", "data_process")],
)
def test_a_stage_is_named_after_its_task(task: str, name: str, stage: str) -> None:
    choice = TaskChoice(task=task)
    assert (choice.task_name, choice.stage) == (name, stage)
