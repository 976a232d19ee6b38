"""--on_bad_sample skip: bad rows are listed, and nothing changes for the others."""

import json
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError, UsageError
from dstrain.storage import BAD_SAMPLES

from tests.support.runs import files, log, project, same, train, train_in_two_stages

pytestmark = pytest.mark.usefixtures("tiny")

SKIP: dict[str, Any] = {"on_bad_sample": "skip", "num_epochs": 2, "save_steps": 100}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return project(tmp_path)


def hurt(path: Path) -> None:
    content = path.read_bytes()
    at = len(content) // 2
    path.write_bytes(content[:at] + b"\xff\xd7" * 8 + content[at + 16 :])


def listed(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / BAD_SAMPLES).read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_bad_rows_are_skipped_whole_and_listed_with_their_places(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [f'{{"image": "{row}.png", "prompt": "p{row}"}}' for row in range(6)]
    rows[1] = '{"image": "1.png", "prompt": '
    rows.insert(2, '{"image": "none.png", "prompt": {"en": "a"}}')
    rows.append('{"image": "", "prompt": "nothing"}')
    (folder / "data/metadata.json").unlink()
    (folder / "data/metadata.jsonl").write_text("\n".join(rows))
    hurt(folder / "data/4.png")
    logs = train(folder, **SKIP) / "logs"
    found = {(line["row"], line["column"]): line for line in listed(logs)}
    places = [(2, ""), (3, "prompt"), (3, "image"), (6, "image"), (8, "image")]
    assert sorted(found) == sorted(places)
    assert {line["file"] for line in found.values()} == {"metadata.jsonl"}
    assert "'none.png'" in found[3, "image"]["reason"]
    assert "'4.png'" in found[6, "image"]["reason"]
    said = capfd.readouterr().err
    assert "4 of 8 rows" in said and str(logs / BAD_SAMPLES) in said
    assert "4 samples x 1" in said


def test_split_or_with_workers_the_same_rows_are_left_out(folder: Path) -> None:
    hurt(folder / "data/5.png")
    hurt(folder / "data/1.png")
    whole = train(folder, **SKIP)
    split = train_in_two_stages(folder, folder / "split", **SKIP)
    workers = {"dataset_num_workers": 2, "output_path": folder / "workers"}
    places = [
        whole / "logs",
        folder / "split/cache",
        train(folder, **SKIP, **workers) / "logs",
    ]
    assert [[line["row"] for line in listed(place)] for place in places] == [[2, 6]] * 3
    assert log(split) == log(whole) == log(folder / "workers")
    assert same(files(split), files(whole))
    assert not (split / "logs" / BAD_SAMPLES).exists()


@pytest.mark.parametrize("choice", ["skip", "error"])
def test_a_list_goes_when_nothing_is_skipped(choice: str, folder: Path) -> None:
    cache = {"task": "sft:data_process", "output_path": folder / "store"}
    whole = (folder / "data/1.png").read_bytes()
    hurt(folder / "data/1.png")
    train(folder, **SKIP, **cache)
    assert (folder / "store" / BAD_SAMPLES).exists()
    (folder / "data/1.png").write_bytes(whole)
    train(folder, **SKIP | cache | {"on_bad_sample": choice})
    assert not (folder / "store" / BAD_SAMPLES).exists()


def test_a_resumed_run_skips_the_same_rows(folder: Path) -> None:
    whole = (folder / "data/2.png").read_bytes()
    hurt(folder / "data/2.png")
    train(folder, **{**SKIP, "num_epochs": 1})
    (folder / "data/2.png").write_bytes(whole)
    # Of the same size, so that as many rows of each size stay.
    hurt(folder / "data/0.png")
    with pytest.raises(StateError, match="--resume"):
        train(folder, **SKIP, resume="auto")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("task", ["sft", "sft:data_process"])
def test_without_skip_damage_that_decoding_meets_is_named_by_row_and_column(
    folder: Path, task: str, workers: int
) -> None:
    if task != "sft":  # so that the row that is damaged is the only one to compute
        train(folder, task=task)
    hurt(folder / "data/3.png")
    with pytest.raises(UsageError, match=r"'3\.png'") as caught:
        train(folder, task=task, dataset_num_workers=workers)
    assert caught.value.where == "metadata.json:4:image"
