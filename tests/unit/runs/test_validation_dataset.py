"""A second dataset is validated as held-out rows are, and training never sees it."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import Pipeline, SampleKey, StateError, UsageError
from dstrain.cli.main import main
from dstrain.errors import CacheError
from dstrain.runs import Setup
from dstrain.runs.checkpoints.state import load_state, states
from dstrain.runs.stage_1 import precompute
from dstrain.runs.stage_1.keyed_samples import KeyedSamples
from dstrain.runs.validation_loss import COLUMNS, held_out_losses
from dstrain.storage import BAD_SAMPLES

from tests.support.family import write_data
from tests.support.processes import commands, in_processes, words
from tests.support.runs import (
    config,
    log,
    outcome,
    same,
    train,
    training_run,
    warm_project,
)

pytestmark = pytest.mark.usefixtures("tiny")
CAPTIONS = ("cat", "a dog that no other row has", "dog")
"""Two of them are prompts of the dataset that is trained on."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose denoiser has dropout, with a second dataset in `val`."""
    folder = warm_project(tmp_path_factory.mktemp("project"), dropout=0.3)
    write_data(folder / "val", CAPTIONS, ((24, 16), (16, 16)))
    return folder


def second(here: Path, **flags: Any) -> dict[str, Any]:
    return {"validation_dataset_base_path": here / "val", **flags}


def table(folder: Path) -> list[dict[str, float]]:
    with (folder / "logs/validation.csv").open() as file:
        return [
            {name: float(text) for name, text in row.items()}
            for row in csv.DictReader(file)
        ]


def fill(here: Path, cache: Path, **flags: Any) -> None:
    train(here, task="sft:data_process", feature_cache=cache, **flags)


def without_validation(folder: Path) -> dict[str, Any]:
    found = outcome(folder)
    found["names"] = [name for name in found["names"] if "validation" not in name]
    return found


def test_training_is_the_same_with_and_without_it(here: Path, tmp_path: Path) -> None:
    flags = {"num_epochs": 2, "save_steps": 4}
    train(here, output_path=tmp_path / "without", **flags)
    out = train(here, output_path=tmp_path / "with", **second(here), **flags)
    assert [row["step"] for row in table(out)] == [0, 4, 8, 12]
    left, right = without_validation(out), without_validation(tmp_path / "without")
    # It lists the two files of the table.
    assert left["names"] == right["names"]
    assert same(left, right)


def test_the_loss_is_the_mean_over_its_rows_and_parts_of_the_timesteps(
    here: Path, tmp_path: Path
) -> None:
    out = train(here, output_path=tmp_path, max_steps=1, **second(here))
    ready = training_run(config(here, dataset_base_path=here / "val"))
    module = ready.module.eval()
    module.timestep_sampler = module.timestep_sampler.stratified()
    means = []
    for part in range(4):
        losses = [
            module.losses([ready.source.sample(row)], [SampleKey(0, -1, part, row)])
            for row in range(len(CAPTIONS))
        ]
        means.append(sum(loss.item() for loss in losses) / len(CAPTIONS))
    assert [table(out)[0][name] for name in COLUMNS[2:]] == pytest.approx(
        means, rel=1e-5
    )


def test_stage_2_reads_its_values_from_the_cache_and_no_file_of_it(
    here: Path, tmp_path: Path
) -> None:
    flags = second(here, num_epochs=1, validation_steps=2)
    unsplit = train(here, output_path=tmp_path / "unsplit", **flags)
    shutil.copytree(here / "val", tmp_path / "val")
    moved = {**flags, "validation_dataset_base_path": tmp_path / "val"}
    fill(here, tmp_path / "cache", **moved)
    shutil.rmtree(tmp_path / "val")
    stage_2 = {"task": "sft:train", "feature_cache": tmp_path / "cache"}
    out = train(here, output_path=tmp_path / "out", **stage_2, **moved)
    for name in ("validation.csv", "validation.jsonl"):
        one, other = (folder / "logs" / name for folder in (out, unsplit))
        assert one.read_bytes() == other.read_bytes()
    assert log(out) == log(unsplit)
    ready = training_run(config(here, **stage_2, **moved))
    assert set(ready.module.pipeline.components) == {"dit"}
    whole = training_run(config(here, **flags))
    assert same(held_out_losses(ready), held_out_losses(whole))
    # Without a dataset that is named, the rows to train on are the others.
    plain = train(
        *(here,), output_path=tmp_path / "plain", num_epochs=1,
        dataset_base_path=None, **stage_2,
    )  # fmt: skip
    assert log(plain) == log(out)


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
    fill(here, tmp_path / "both", **second(here))
    assert len(loaded) == 1
    assert "precomputing 3 of 3 validation samples" in capsys.readouterr().err
    fill(here, tmp_path / "both", **second(here))
    assert len(loaded) == 1
    fill(here, tmp_path / "alone")
    (alone,) = (tmp_path / "alone/plans").glob("*.json")
    (same_name,) = (tmp_path / "both/plans").glob(alone.name)
    # The rows to train on are planned as if there were no others.
    columns = json.loads(alone.read_bytes())["record"]["columns"]
    assert json.loads(same_name.read_bytes())["record"]["columns"] == columns
    assert len(list((tmp_path / "both/plans").glob("*.json"))) == 2


def test_a_model_that_is_replaced_between_the_datasets_is_loaded_again(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    load = Pipeline.from_found
    key_rows = precompute.key_rows

    def count(*args: Any, **named: Any) -> Any:
        loaded.append(args)
        return load(*args, **named)

    def replaced(setup: Setup) -> KeyedSamples:
        keyed = key_rows(setup)
        if not setup.is_validation:
            return keyed
        return replace(keyed, components={**keyed.components, "vae": "of another file"})

    monkeypatch.setattr(Pipeline, "from_found", count)
    monkeypatch.setattr(precompute, "key_rows", replaced)
    fill(here, tmp_path / "cache", **second(here))
    assert len(loaded) == 2


def test_a_cache_without_it_is_refused_with_the_command_that_fills_it(
    here: Path, tmp_path: Path
) -> None:
    fill(here, tmp_path / "cache")
    with pytest.raises(CacheError) as found:
        train(here, task="sft:train", feature_cache=tmp_path / "cache", **second(here))
    assert found.value.what.endswith("the rows of --validation_dataset_base_path")
    stage_1, both = [line for line in found.value.help_lines if "to fill it" in line]
    for advice in (stage_1, both):
        assert f"--validation_dataset_base_path {here / 'val'}" in advice


def test_two_processes_compute_what_one_does(here: Path, tmp_path: Path) -> None:
    given = vars(config(here, **second(here)))
    names = ("model", "dataset_base_path", "model_paths", "lora_rank", *second(here))
    flags = {name: given[name] for name in names}
    # No step moves the weights, which would differ by rounding.
    flags |= {"learning_rate": 1e-30, "max_steps": 1, "mixed_precision": "no"}
    for size, place in ((1, "one"), (2, "two")):
        cache = {"feature_cache": tmp_path / f"cache-{place}"}
        stage_1 = words({**flags, **cache, "task": "sft:data_process"})
        stage_2 = words(
            {**flags, **cache, "task": "sft:train", "output_path": tmp_path / place}
        )
        ended = in_processes(size, commands(stage_1, stage_2), tmp_path)
        assert ended.codes == (0,) * size, ended.said
    assert len(table(tmp_path / "one")) == 2
    assert table(tmp_path / "one") == table(tmp_path / "two")


def test_a_run_resumes_with_the_same_rows_or_without_any(
    here: Path, tmp_path: Path
) -> None:
    shutil.copytree(here / "val", tmp_path / "val")
    flags = {"validation_steps": 1, "save_steps": 1, "resume": "auto"}
    own = {"validation_dataset_base_path": tmp_path / "val"}
    out = tmp_path / "out"
    train(here, output_path=out, max_steps=1, save_steps=1)
    train(here, output_path=out, max_steps=2, **flags, **own)
    assert "validation metadata" in load_state(states(out)[0]).content
    train(here, output_path=out, max_steps=3, **flags, **own)
    assert [row["step"] for row in table(out)] == [1, 2, 3]
    write_data(tmp_path / "val", ("other",), ((16, 16),))
    with pytest.raises(StateError, match="its validation metadata") as found:
        train(here, output_path=out, max_steps=4, **flags, **own)
    assert "dataset has changed" in found.value.what
    train(here, output_path=out, max_steps=4, save_steps=1, resume="auto")
    assert len(table(out)) == 3


def test_bad_rows_are_named_or_skipped_as_those_of_the_dataset(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(here / "val", tmp_path / "val")
    (tmp_path / "val/1.png").write_bytes(b"no image")
    own = {"validation_dataset_base_path": tmp_path / "val", "max_steps": 1}
    with pytest.raises(UsageError, match=r"val/metadata\.json: 1 bad value"):
        train(here, output_path=tmp_path / "refused", **own)
    for stage, place in (("", "out"), (":data_process", "cache")):
        given = {"task": f"sft{stage}", "on_bad_sample": "skip", **own}
        if stage:
            given["feature_cache"] = tmp_path / place
        train(here, output_path=tmp_path / place, **given)
        assert "1 of 3 validation rows are skipped" in capsys.readouterr().err
        folder = tmp_path / place / ("" if stage else "logs")
        (line,) = map(json.loads, (folder / BAD_SAMPLES).read_text().splitlines())
        assert (line["dataset"], line["row"]) == ("validation", 2)
    train(
        *(here,), task="sft:train", output_path=tmp_path / "split",
        feature_cache=tmp_path / "cache", on_bad_sample="skip", **own,
    )  # fmt: skip
    assert table(tmp_path / "split") == table(tmp_path / "out")


def test_a_folder_without_a_dataset_is_refused_by_the_option_of_its_own(
    here: Path, tmp_path: Path
) -> None:
    (tmp_path / "val").mkdir()
    with pytest.raises(UsageError, match="--validation_dataset_metadata_path"):
        train(
            here,
            output_path=tmp_path / "out",
            validation_dataset_base_path=tmp_path / "val",
        )


def test_a_dry_run_names_it_and_refuses_what_the_run_refuses(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", "tiny", "--dataset_base_path", str(here / "data"), "--dry_run"]
    given = ["--validation_dataset_base_path", str(here / "val")]
    assert main([*flags, *given, "--output_path", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f" 3 rows in {here / 'val/metadata.json'} for validation" in said
    absent = ["--validation_dataset_base_path", str(tmp_path / "val")]
    assert main([*flags, *absent, "--output_path", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"--validation_dataset_base_path: {tmp_path / 'val'} does not exist" in said


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_option_that_only_the_second_dataset_cannot_have_names_it(
    here: Path, tmp_path: Path, dry_run: bool
) -> None:
    shutil.copytree(here / "data", tmp_path / "data")
    rows = json.loads((tmp_path / "data/metadata.json").read_text())
    noted = [{**row, "note": row["prompt"]} for row in rows]
    (tmp_path / "data/metadata.json").write_text(json.dumps(noted))
    flags: dict[str, Any] = {"dataset_base_path": tmp_path / "data"}
    flags |= {"column": ("prompt=note",), "max_steps": 1, "dry_run": dry_run}
    with pytest.raises(UsageError, match="has no column 'note'") as caught:
        train(here, output_path=tmp_path / "out", **second(here), **flags)
    assert caught.value.where == "validation: --column"
