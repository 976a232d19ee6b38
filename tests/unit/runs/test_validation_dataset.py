"""A second dataset is validated as held-out rows are, and training never sees it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from dstrain import Pipeline, StateError, UsageError

from tests.support.family import write_data
from tests.support.runs import config, log, train, training_run, validation
from tests.support.training_batches import means_of_parts

pytestmark = pytest.mark.usefixtures("tiny")
CAPTIONS = ("cat", "a dog that no other row has", "dog")
"""Two of them are prompts of the dataset that is trained on."""


@pytest.fixture(scope="module")
def here(dropping: Path) -> Path:
    """A project with a second dataset in `val`."""
    write_data(dropping / "val", CAPTIONS, ((24, 16), (16, 16)))
    return dropping


@pytest.fixture
def own(here: Path, tmp_path: Path) -> Path:
    """A copy of the second dataset, which may be changed."""
    return Path(shutil.copytree(here / "val", tmp_path / "val"))


def second(folder: Path) -> dict[str, Any]:
    return {"validation_dataset_base_path": folder}


def fill(here: Path, cache: Path, **flags: Any) -> None:
    train(here, task="sft:data_process", feature_cache=cache, **flags)


def test_the_loss_is_the_mean_over_its_rows_and_parts_of_the_timesteps(
    here: Path, tmp_path: Path
) -> None:
    out = train(here, output_path=tmp_path, max_steps=1, **second(here / "val"))
    ready = training_run(config(here, dataset_base_path=here / "val"))
    found = [validation(out)[0][f"validation_loss_q{part}"] for part in (1, 2, 3, 4)]
    means = means_of_parts(ready, range(len(CAPTIONS)))
    assert found == pytest.approx(means, rel=1e-5)


def test_stage_2_reads_its_values_from_the_cache_and_no_file_of_it(
    here: Path, own: Path, tmp_path: Path
) -> None:
    flags = {"num_epochs": 1, "validation_steps": 2, **second(own)}
    unsplit = train(here, output_path=tmp_path / "unsplit", **flags)
    fill(here, tmp_path / "cache", **flags)
    shutil.rmtree(own)
    stage_2 = {"task": "sft:train", "feature_cache": tmp_path / "cache"}
    out = train(here, output_path=tmp_path / "out", **stage_2, **flags)
    assert validation(out) == validation(unsplit)
    assert log(out) == log(unsplit)
    # Without a dataset that is named, the rows to train on are the others.
    plain = {"output_path": tmp_path / "plain", "dataset_base_path": None, **stage_2}
    assert log(train(here, num_epochs=1, **plain)) == log(out)


def test_stage_1_loads_the_encoders_once_and_encodes_nothing_twice(
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded = []
    load = Pipeline.from_found

    def count(*args: Any, **named: Any) -> Any:
        loaded.append(args)
        return load(*args, **named)

    monkeypatch.setattr(Pipeline, "from_found", count)
    both = tmp_path / "both"
    fill(here, both, **second(here / "val"))
    assert "precomputing 3 of 3 validation " in capsys.readouterr().err
    fill(here, both, **second(here / "val"))
    assert len(loaded) == 1
    fill(here, tmp_path / "alone")
    (alone,) = (tmp_path / "alone/plans").glob("*.json")
    # The rows to train on are planned as if there were no others.
    plans = [
        json.loads(path.read_bytes()) for path in (alone, both / "plans" / alone.name)
    ]
    assert plans[0]["record"]["columns"] == plans[1]["record"]["columns"]
    assert len(list((both / "plans").glob("*.json"))) == 2


def test_a_cache_without_it_is_refused_with_the_command_that_fills_it(
    here: Path, tmp_path: Path
) -> None:
    fill(here, tmp_path / "cache")
    stage_2 = {"task": "sft:train", "feature_cache": tmp_path / "cache"}
    with pytest.raises(StateError, match="--validation_dataset_base_path") as found:
        train(here, **stage_2, **second(here / "val"))
    flag = f"--validation_dataset_base_path {here / 'val'}"
    assert sum(flag in line for line in found.value.help_lines) == 1


def test_a_run_resumes_with_the_same_rows_or_without_any(
    here: Path, own: Path, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"output_path": tmp_path / "out", "save_steps": 1}
    out = train(here, max_steps=1, **flags)
    flags |= {"resume": "auto", "validation_steps": 1}
    train(here, max_steps=2, **flags, **second(own))
    train(here, max_steps=3, **flags, **second(own))
    assert [row["step"] for row in validation(out)] == [1, 2, 3]
    write_data(own, ("other",), ((16, 16),))
    os.utime(own / "metadata.json", (2**32, 2**32))
    with pytest.raises(StateError, match="dataset: validation metadata"):
        train(here, max_steps=4, **flags, **second(own))
    train(here, max_steps=4, **flags | {"validation_steps": None})
    assert len(validation(out)) == 3


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_option_that_only_the_second_dataset_cannot_have_names_it(
    here: Path, tmp_path: Path, dry_run: bool
) -> None:
    data = Path(shutil.copytree(here / "data", tmp_path / "data"))
    rows = json.loads((data / "metadata.json").read_text())
    noted = [{**row, "note": row["prompt"]} for row in rows]
    (data / "metadata.json").write_text(json.dumps(noted))
    flags: dict[str, Any] = {"column": ("prompt=note",), "dry_run": dry_run}
    flags |= {"dataset_base_path": data, "output_path": tmp_path / "out"}
    with pytest.raises(UsageError, match="'note'") as caught:
        train(here, max_steps=1, **second(here / "val"), **flags)
    assert caught.value.where == "validation: --column"
