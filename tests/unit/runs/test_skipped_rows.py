"""--on_bad_sample skip: bad rows are skipped and listed, and nothing changes for the
others.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import StateError, UsageError, run
from dstrain.cli.main import main
from dstrain.data import Cell, decoding as bad_samples, load_cell
from dstrain.data.decoding import MEMORY
from dstrain.storage import BAD_SAMPLES, ManyFiles, file_memory, lock

from tests.support.runs import config, files, log, project, train, training_run

pytestmark = pytest.mark.usefixtures("tiny")

SKIP: dict[str, Any] = {"on_bad_sample": "skip", "num_epochs": 2, "save_steps": 100}


def hurt(path: Path) -> None:
    """Overwrite bytes in the middle of a file."""
    content = path.read_bytes()
    at = len(content) // 2
    path.write_bytes(content[:at] + b"\xff\xd7" * 8 + content[at + 16 :])


def listed(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / BAD_SAMPLES).read_text().splitlines()
    ]


def draws(folder: Path, **changes: Any) -> list[tuple[int, int, int]]:
    """(epoch, repeat, row) of two epochs' samples in order."""
    order = training_run(config(folder, **changes)).order
    return [
        (key.epoch, key.repeat, key.row)
        for epoch in range(2)
        for (key,) in order.global_batches(epoch)
    ]


def test_bad_rows_are_skipped_whole_and_listed_with_their_places(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = project(tmp_path)
    rows = [
        f'{{"image": "{number}.png", "prompt": "p{number}"}}' for number in range(6)
    ]
    rows[1] = '{"image": "1.png", "prompt": '
    rows.insert(2, '{"image": "none.png", "prompt": {"en": "a"}}')
    rows.append('{"image": "", "prompt": "nothing"}')
    (folder / "data/metadata.json").unlink()
    (folder / "data/metadata.jsonl").write_text("\n".join(rows))
    hurt(folder / "data/4.png")
    out = train(folder, **SKIP)
    found = [
        (line["file"], line["row"], line["column"]) for line in listed(out / "logs")
    ]
    places = [(2, ""), (3, "prompt"), (3, "image"), (6, "image"), (8, "image")]
    assert sorted(found) == sorted(("metadata.jsonl", *place) for place in places)
    reasons = {
        (line["row"], line["column"]): line["reason"] for line in listed(out / "logs")
    }
    assert reasons[3, "image"] == "no such file 'none.png'"
    assert reasons[6, "image"].startswith("'4.png' cannot be read")
    assert reasons[8, "image"] == "is blank"
    said = capfd.readouterr().err
    assert f"4 of 8 rows are skipped, listed in {out / 'logs' / BAD_SAMPLES}" in said
    assert "4 samples x 1" in said


@pytest.mark.parametrize("bad", [0, 2, 5])
def test_the_rows_that_stay_keep_their_numbers_and_their_order(
    tmp_path: Path, bad: int
) -> None:
    folder = project(tmp_path)
    whole = draws(folder)
    hurt(folder / f"data/{bad}.png")
    left = draws(folder, **SKIP)
    assert left == [place for place in whole if place[2] != bad] and len(left) == 10


def test_the_samples_that_stay_are_those_of_their_rows(tmp_path: Path) -> None:
    folder = project(tmp_path)
    source = training_run(config(folder)).source
    whole = [source.sample(row).values for row in range(6)]
    hurt(folder / "data/2.png")
    source = training_run(config(folder, **SKIP)).source
    for row in (0, 1, 3, 4, 5):
        values = source.sample(row).values
        assert values["prompt"] == whole[row]["prompt"]
        assert np.array_equal(
            np.asarray(values["input_image"]), np.asarray(whole[row]["input_image"])
        )


def test_a_split_run_leaves_out_the_same_rows_as_one_in_a_piece(tmp_path: Path) -> None:
    folder = project(tmp_path)
    hurt(folder / "data/5.png")
    hurt(folder / "data/1.png")
    whole = train(folder, **SKIP)
    train(folder, **SKIP, task="sft:data_process", output_path=folder / "store")
    assert (
        [line["row"] for line in listed(folder / "store")]
        == [line["row"] for line in listed(whole / "logs")]
        == [2, 6]
    )
    split = train(
        folder,
        **SKIP,
        task="sft:train",
        feature_cache=folder / "store",
        output_path=folder / "split",
    )
    assert log(split) == log(whole)
    assert all(
        torch.equal(a, files(split)[n][k])
        for n, part in files(whole).items()
        for k, a in part.items()
    )
    assert not (split / "logs" / BAD_SAMPLES).exists()


def test_the_result_depends_on_no_worker(tmp_path: Path) -> None:
    folder = project(tmp_path)
    hurt(folder / "data/3.png")
    one = train(folder, **SKIP)
    two = train(folder, **SKIP, dataset_num_workers=2, output_path=folder / "two")
    assert log(one) == log(two) and listed(one / "logs") == listed(two / "logs")


def test_a_rerun_decodes_only_what_changed_or_was_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_memory, "SETTLED", 0)
    folder = project(tmp_path)
    (folder / "out/logs").mkdir(parents=True)
    decoded: list[str] = []

    def load(cell: Cell) -> Any:
        decoded.extend(Path(file).name for file in cell.files)
        return load_cell(cell)

    monkeypatch.setattr(bad_samples, "load_cell", load)
    hurt(folder / "data/1.png")
    training_run(config(folder, **SKIP))
    assert sorted(decoded) == [f"{number}.png" for number in range(6)]
    decoded.clear()
    (folder / "data/4.png").write_bytes((folder / "data/2.png").read_bytes())
    training_run(config(folder, **SKIP))
    assert sorted(decoded) == ["1.png", "4.png"]
    (folder / "out/logs" / MEMORY).write_text("no json")
    decoded.clear()
    training_run(config(folder, **SKIP))
    assert len(decoded) == 6


def test_a_file_changed_just_before_is_not_remembered(tmp_path: Path) -> None:
    folder = project(tmp_path)
    (folder / "out/logs").mkdir(parents=True)
    training_run(config(folder, **SKIP))
    memory = folder / "out/logs" / MEMORY
    assert memory.is_file() and len(ManyFiles(memory)) == 0


@pytest.mark.parametrize("choice", ["skip", "error"])
def test_a_list_of_an_earlier_run_goes_when_nothing_is_skipped(
    choice: Any, tmp_path: Path
) -> None:
    folder = project(tmp_path)
    cache = {"task": "sft:data_process", "output_path": folder / "store"}
    whole = (folder / "data/1.png").read_bytes()
    hurt(folder / "data/1.png")
    train(folder, **SKIP, **cache)
    assert (folder / "store" / BAD_SAMPLES).exists()
    (folder / "data/1.png").write_bytes(whole)
    train(folder, **SKIP | cache | {"on_bad_sample": choice})
    assert not (folder / "store" / BAD_SAMPLES).exists()


def test_a_resumed_run_skips_the_same_rows(tmp_path: Path) -> None:
    folder = project(tmp_path)
    whole = (folder / "data/2.png").read_bytes()
    hurt(folder / "data/2.png")
    train(folder, **{**SKIP, "num_epochs": 1})
    (folder / "data/2.png").write_bytes(whole)
    hurt(
        folder / "data/0.png"
    )  # of the size of 2.png, so that as many rows of each size stay
    with pytest.raises(StateError, match="--resume"):
        train(folder, **SKIP, resume="auto")


def test_every_row_bad_is_an_error_that_names_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = project(tmp_path)
    for number in range(6):
        hurt(folder / f"data/{number}.png")
    with pytest.raises(UsageError, match="6 bad values") as caught:
        train(folder, **SKIP)
    assert [line.split(": ")[0] for line in caught.value.help_lines] == [
        f"metadata.json:{n}:image" for n in range(1, 7)
    ]


def test_metadata_that_is_no_table_is_an_error(tmp_path: Path) -> None:
    folder = project(tmp_path)
    (folder / "data/metadata.json").write_text('{"image": []}')
    with pytest.raises(UsageError, match="is not a list of objects"):
        train(folder, **SKIP)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("task", ["sft", "sft:data_process"])
def test_without_skip_damage_that_decoding_meets_is_named_by_row_and_column(
    tmp_path: Path, task: str, workers: int
) -> None:
    folder = project(tmp_path)
    hurt(folder / "data/3.png")
    with pytest.raises(
        UsageError, match=r"metadata\.json:4:image: '3\.png' cannot be read"
    ):
        train(folder, task=task, dataset_num_workers=workers)


def test_the_command_line_says_and_does_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = project(tmp_path)
    hurt(folder / "data/3.png")
    words = [
        "--model",
        "tiny",
        "--toy",
        "--dataset_base_path",
        str(folder / "data"),
        "--output_path",
    ]
    assert main([*words, str(folder / "error")]) == 2
    assert (
        "dstrain: error: metadata.json:4:image: '3.png' cannot be read"
        in capfd.readouterr().err
    )
    assert main([*words, str(folder / "skip"), "--on_bad_sample", "skip"]) == 0
    assert [line["row"] for line in listed(folder / "skip/logs")] == [4]


def test_the_folder_in_use_by_another_run_is_named(tmp_path: Path) -> None:
    folder = project(tmp_path)
    with lock(folder / "out"), pytest.raises(StateError, match="is in use"):
        run(config(folder, **SKIP))
    assert not (folder / "out/logs" / MEMORY).exists()  # nothing was decoded before
