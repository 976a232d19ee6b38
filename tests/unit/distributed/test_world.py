"""Several processes, for real: the last samples, and what a step does not reach."""

import json
import os
import select
import socket
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import Store

from tests.support.family import weights_of, write_data
from tests.support.processes import commands, in_processes, words
from tests.support.runs import files, log, project

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = project(tmp_path_factory.mktemp("project"))
    for rows in (2, 5):
        write_data(folder / f"rows-{rows}", tuple(f"caption {i}" for i in range(rows)))
    return folder


def command(here: Path, data: str = "data", **more: Any) -> list[str]:
    models = json.dumps(list(weights_of(here / "model").values()))
    data_flags = {"dataset_base_path": here / data, "model_paths": models}
    return words({"model": "tiny", **data_flags, **more})


def ran(size: int, here: Path, output: Path, **more: Any) -> None:
    """Run a command in so many processes."""
    line = command(here, learning_rate=1e-2, **more)
    ended = in_processes(size, commands(line), output)
    assert ended.codes == (0,) * size, ended.said


def test_the_process_that_holds_the_store_ends_after_the_others_have_looked(
    here: Path, tmp_path: Path
) -> None:
    """It is the first one where no launcher holds it; the second asks late."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    first_ended, first_lives = os.pipe()
    check = Store.check

    def late(store: Store, keys: list[str]) -> bool:
        if any("/seen/" in key for key in keys):
            select.select([first_ended], [], [], 1.0)
        return check(store, keys)

    def work(rank: int) -> int:
        os.environ["MASTER_PORT"] = port
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        if rank == 1:
            os.close(first_lives)
            Store.check = late  # type: ignore[method-assign]  # in a fork
        stage_1 = {"task": "sft:data_process", "feature_cache": tmp_path / "cache"}
        return commands(command(here, **stage_1))(rank)

    ended = in_processes(
        2, work, tmp_path, launched=False, poke=lambda pids: os.close(first_lives)
    )
    os.close(first_ended)
    assert ended.codes == (0, 0), ended.said


@pytest.mark.parametrize("size", [2, 4])
def test_where_the_last_samples_are_fewer_than_the_processes_fillers_weigh_nothing(
    size: int, here: Path, tmp_path: Path
) -> None:
    """Five rows: of the last step's samples some processes have one too few, or none."""
    common = {"data": "rows-5", "num_epochs": 2, "lora_rank": 2, "batch_size": 2}
    for count in (1, size):
        accumulated = {"gradient_accumulation_steps": size // count}
        output = {"output_path": tmp_path / str(count)}
        ran(count, here, tmp_path, **common, **accumulated, **output)
    one, many = (log(tmp_path / str(count)) for count in (1, size))
    for row, other in zip(one, many, strict=True):
        assert row == pytest.approx(other, rel=2e-5)


@pytest.mark.parametrize("trained", ["dit", "text_encoder", "dit,text_encoder"])
def test_nothing_is_trained_that_a_step_does_not_reach(
    trained: str, here: Path, tmp_path: Path
) -> None:
    """DDP ends the second step where the first had parameters without a gradient."""
    output = tmp_path / "out"
    ran(2, here, tmp_path, output_path=output, num_epochs=2, trainable_models=trained)
    assert len(log(output)) == 8
    assert files(output)
