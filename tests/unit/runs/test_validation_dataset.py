"""A second dataset is validated as held-out rows are, and training never sees it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from dstrain import Pipeline, SampleKey, StateError, UsageError
from dstrain.cli.main import main
from dstrain.storage import BAD_SAMPLES, RunFiles

from tests.support.family import write_data
from tests.support.runs import (
    config,
    log,
    outcome,
    same,
    train,
    train_in_two_stages,
    training_run,
    validation,
)

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


def without_validation(folder: Path) -> dict[str, Any]:
    found = outcome(folder)
    found["names"] = [name for name in found["names"] if "validation" not in name]
    return found


def test_training_is_the_same_with_and_without_it(here: Path, tmp_path: Path) -> None:
    flags = {"num_epochs": 2, "save_steps": 4}
    plain = train(here, output_path=tmp_path / "without", **flags)
    out = train(here, output_path=tmp_path / "with", **second(here / "val"), **flags)
    assert [row["step"] for row in validation(out)] == [0, 4, 8, 12]
    assert same(without_validation(out), without_validation(plain))


def test_the_loss_is_the_mean_over_its_rows_and_parts_of_the_timesteps(
    here: Path, tmp_path: Path
) -> None:
    out = train(here, output_path=tmp_path, max_steps=1, **second(here / "val"))
    ready = training_run(config(here, dataset_base_path=here / "val"))
    module = ready.module.eval()
    module.timestep_sampler = module.timestep_sampler.stratified()
    for part in range(4):
        losses = [
            module.losses([ready.source.sample(row)], [SampleKey(0, -1, part, row)])
            for row in range(len(CAPTIONS))
        ]
        mean = sum(loss.item() for loss in losses) / len(CAPTIONS)
        found = validation(out)[0][f"validation_loss_q{part + 1}"]
        assert found == pytest.approx(mean, rel=1e-5)


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
    assert sum(flag in line for line in found.value.help_lines) == 2


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
    named = f"validation metadata.* since: {own}/metadata.json"
    with pytest.raises(StateError, match=named):
        train(here, max_steps=4, **flags, **second(own))
    train(here, max_steps=4, **flags | {"validation_steps": None})
    assert len(validation(out)) == 3


def test_bad_rows_are_named_or_skipped_as_those_of_the_dataset(
    here: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "1.png").write_bytes(b"no image")
    flags = {"max_steps": 1, **second(own)}
    with pytest.raises(UsageError) as caught:
        train(here, output_path=tmp_path / "refused", **flags)
    assert caught.value.where.endswith("val/metadata.json")
    flags["on_bad_sample"] = "skip"
    whole = train(here, output_path=tmp_path / "whole", **flags)
    split = train_in_two_stages(here, tmp_path, **flags)
    assert capsys.readouterr().err.count("1 of 3 validation rows") == 3
    for folder in (whole / "logs", tmp_path / "cache"):
        (line,) = map(json.loads, (folder / BAD_SAMPLES).read_text().splitlines())
        assert (line["dataset"], line["row"]) == ("validation", 2)
    assert validation(split) == validation(whole)
    assert f"logs/{BAD_SAMPLES}" in RunFiles.read(whole).steps


def test_a_dry_run_names_it_and_refuses_what_the_run_refuses(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--model tiny --dataset_base_path {here / 'data'} --output_path out"
    line = [*flags.split(), "--dry_run", "--validation_dataset_base_path"]
    assert main([*line, str(here / "val")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f" 3 rows in {here / 'val/metadata.json'} for validation" in said
    assert main([*line, str(tmp_path / "val")]) == 2
    option = f"--validation_dataset_base_path: {tmp_path / 'val'} "
    assert option in capsys.readouterr().err


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
