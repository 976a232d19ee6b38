"""Several processes, for real: rows of stage 1, learning rates, the last samples, and
what a step does not reach.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from dstrain.cache import FeatureCache

from tests.support.caching_project import plain
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


def flags(here: Path, data: str = "data", **more: Any) -> dict[str, Any]:
    models = json.dumps(list(weights_of(here / "model").values()))
    return {
        "model": "tiny",
        "dataset_base_path": here / data,
        "model_paths": models,
        "learning_rate": 1e-2,
        **more,
    }


def ran(size: int, here: Path, given: dict[str, Any]) -> list[str]:
    ended = in_processes(size, commands(words(given)), here)
    assert ended.codes == (0,) * size, ended.said
    return ended.said[0].splitlines()


@pytest.mark.parametrize("rows", [2, 5])
def test_stage_1_gives_exactly_the_rows_on_any_number_of_processes(
    rows: int, here: Path, tmp_path: Path
) -> None:
    stores = []
    for size in (1, 2, 3, 4):
        cache = tmp_path / str(size)
        ran(
            size,
            tmp_path,
            flags(here, f"rows-{rows}", task="sft:data_process", feature_cache=cache),
        )
        store = FeatureCache.open(cache)
        ((plan, _),) = store.plans()
        lines = list(store.plan_rows(plan))
        values = [
            plain(store.read(v["at"]))
            for line in lines
            for v in line["values"].values()
            if "at" in v
        ]
        stores.append((lines, values))
    assert len(stores[0][0]) == rows
    assert stores[1:] == stores[:-1]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_schedule_counts_optimizer_steps_on_any_number_of_processes(
    size: int, here: Path, tmp_path: Path
) -> None:
    common = {"lr_scheduler": "cosine", "num_epochs": 4, "lora_rank": 2}
    ran(size, tmp_path, flags(here, output_path=tmp_path / "out", **common))
    rates = [row["learning_rate"] for row in log(tmp_path / "out")]
    steps = 4 * 2 * math.ceil(3 / size)
    assert rates == pytest.approx(
        [1e-2 * 0.5 * (1 + math.cos(math.pi * k / steps)) for k in range(steps)],
        rel=1e-4,
        abs=1e-8,
    )


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_where_the_last_samples_are_fewer_than_the_processes_fillers_weigh_nothing(
    size: int, here: Path, tmp_path: Path
) -> None:
    """Five rows: of the last step's samples some processes have one too few, or none."""
    common = {"data": "rows-5", "num_epochs": 2, "lora_rank": 2}
    whole = {
        "batch_size": 2,
        "gradient_accumulation_steps": size,
        "output_path": tmp_path / "one",
    }
    ran(1, tmp_path, flags(here, **common, **whole))
    ran(
        size,
        tmp_path,
        flags(here, **common, batch_size=2, output_path=tmp_path / "many"),
    )
    for one, other in zip(log(tmp_path / "one"), log(tmp_path / "many"), strict=True):
        assert one == pytest.approx(other, rel=2e-5)


@pytest.mark.parametrize("trained", ["dit", "text_encoder", "dit,text_encoder"])
def test_nothing_is_trained_that_a_step_does_not_reach(
    trained: str, here: Path, tmp_path: Path
) -> None:
    """DDP ends the second step where the first had parameters without a gradient."""
    ran(
        2,
        tmp_path,
        flags(
            here, output_path=tmp_path / "out", num_epochs=2, trainable_models=trained
        ),
    )
    assert len(log(tmp_path / "out")) == 8
    assert files(tmp_path / "out")
