"""The state of a run: the next learning rate, and how rows are named in messages."""

from pathlib import Path

import pytest

from tests.support.runs import config, project, training_run


@pytest.fixture
def here(tiny: None, tmp_path: Path) -> Path:
    return project(tmp_path)


def test_the_learning_rate_is_that_of_the_next_step(here: Path) -> None:
    run = training_run(
        config(here, lr_scheduler="linear", max_steps=4, learning_rate=0.1)
    )
    rates = []
    for _ in range(4):
        rates.append(run.learning_rate)
        run.optimizer.step()
        run.lr_scheduler.step()
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_a_run_begins_at_step_0_without_a_cache(here: Path) -> None:
    run = training_run(config(here))
    assert (run.step, run.cache_info) == (0, None)
    assert run.data.name_row(2) == run.setup.dataset.table.where(2)
    assert "metadata.json" in run.data.name_row(2)
