"""Several datasets in one run: their rows follow each other, each read with options of its
own, in both ways of training alike.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain.cli.main import main
from dstrain.errors import CacheError, DstrainError, UsageError
from dstrain.runs.resolve import resolve
from dstrain.runs.runner import run
from PIL import Image

from tests.support.family import weights_of, write
from tests.support.runs import config, files, log, same, training_run

pytestmark = pytest.mark.usefixtures("tiny")


def images(folder: Path, count: int, seed: int) -> None:
    """A dataset of images of noise, with the name of its folder in each caption."""
    folder.mkdir()
    numbers = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        pixels = numbers.integers(0, 256, (24, 40, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "prompt": f"{folder.name} {number}"})
    (folder / "metadata.json").write_text(json.dumps(rows))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A model, four images, and three more."""
    write(tmp_path / "model")
    images(tmp_path / "data", 4, 0)
    images(tmp_path / "more", 3, 1)
    return tmp_path


def more(place: Path, **options: Any) -> tuple[str]:
    return (json.dumps({"dataset_base_path": str(place / "more"), **options}),)


def draws(place: Path, **changes: Any) -> Counter[str]:
    """How often an epoch draws each caption."""
    run = training_run(config(place, **changes))
    prompts: Counter[str] = Counter()
    for batch in run.order.global_batches(0):
        for key in batch:
            sample = run.source.sample(key.row, key.chunk, key=key)
            prompts[sample.values["prompt"]] += 1
    return prompts


def test_each_row_of_each_dataset_is_drawn_as_often_as_its_repeats_say(
    place: Path,
) -> None:
    found = draws(place, dataset=more(place, repeats=3), dataset_repeat=2)
    expected = {f"data {number}": 2 for number in range(4)}
    expected |= {f"more {number}": 6 for number in range(3)}
    assert found == expected


def test_a_single_dataset_may_be_a_table_too(place: Path) -> None:
    found = draws(place, dataset_base_path=None, dataset=more(place, repeats=2))
    assert found == {f"more {number}": 2 for number in range(3)}


def test_each_dataset_is_read_with_its_own_options(place: Path) -> None:
    own = {"trigger_word": "sks", "resolution": 16, "caption_dropout": 0.5}
    setup = resolve(config(place, dataset=more(place, **own), max_pixels=24 * 40))
    dataset = setup.dataset
    prompts: dict[int, set[str]] = {}
    sizes: dict[int, set[Any]] = {}
    for (row, _), cells in zip(dataset.sample_ids.tolist(), dataset.rows, strict=True):
        prompts.setdefault(row, set()).add(cells["prompt"].literal)
        sizes.setdefault(row, set()).add(cells["input_image"].shapes)
    assert prompts[0] == {"data 0"}
    assert prompts[4] == {"sks, more 0", ""}
    assert sizes[0] == {((1, 24, 40),)}
    assert sizes[6] == {((1, 16, 16),)} or sizes[6] == {((1, 8, 24),)}
    assert setup.name_row(3) == "metadata.json:4"
    assert setup.name_row(4) == "metadata.json:1"


@pytest.mark.parametrize("dataset_options", [{}, {"repeats": 3, "loss_weight": 0.25}])
def test_unsplit_and_split_runs_are_equal(
    place: Path, dataset_options: dict[str, Any]
) -> None:
    own = {"resolution": "16", "flip": True, **dataset_options}
    changes: dict[str, Any] = {
        "dataset": more(place, **own),
        "max_steps": 12,
        "batch_size": 2,
        "caption_dropout": 0.2,
    }
    run(config(place, output_path=place / "unsplit", **changes))
    for stage in ("data_process", "train"):
        task = {"task": f"sft:{stage}", "feature_cache": place / "cache"}
        run(config(place, output_path=place / "split", **task, **changes))
    assert same(files(place / "unsplit"), files(place / "split"))
    assert log(place / "unsplit") == log(place / "split")
    # Without the dataset, from the cache alone.
    changes |= {"dataset_base_path": None, "feature_cache": place / "cache"}
    run(config(place, output_path=place / "alone", task="sft:train", **changes))
    assert log(place / "alone") == log(place / "split")


def test_the_loss_of_a_dataset_counts_what_its_weight_is(place: Path) -> None:
    """Rows of weight 0 move nothing; those of weight 2 move twice as much."""
    rows = {"dataset_base_path": None, "max_steps": 1}
    losses = {}
    for weight in (0, 1, 2):
        dataset = more(place, loss_weight=weight)
        output = place / f"out-{weight}"
        run(config(place, output_path=output, dataset=dataset, **rows))
        (line,) = log(output)
        losses[weight] = line["loss"], line["grad_norm"]
    assert losses[0] == (0, 0)
    assert losses[2] == pytest.approx(tuple(2 * one for one in losses[1]), rel=1e-5)


def test_nothing_to_do_is_seen_and_a_change_of_any_dataset_too(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {
        "task": "sft:data_process",
        "feature_cache": place / "cache",
        "dataset": more(place),
    }
    run(config(place, **changes))
    capfd.readouterr()
    run(config(place, **changes))
    assert "precomputing 0 of 7 samples" in capfd.readouterr().err
    rows = json.loads((place / "more/metadata.json").read_text())
    rows[1]["prompt"] = "another"
    (place / "more/metadata.json").write_text(json.dumps(rows))
    with pytest.raises(CacheError, match="has changed"):
        run(config(place, **{**changes, "task": "sft:train"}, max_steps=1))
    run(config(place, **changes))
    assert "precomputing 1 of 7 samples" in capfd.readouterr().err


def test_stage_2_refuses_other_options_of_a_dataset(place: Path) -> None:
    cache = {"feature_cache": place / "cache"}
    run(config(place, task="sft:data_process", dataset=more(place, flip=True), **cache))
    for other in (more(place), more(place, flip=True, resolution=16), ()):
        with pytest.raises(CacheError, match="--dataset 1"):
            run(config(place, task="sft:train", dataset=other, max_steps=1, **cache))


def test_a_damaged_dataset_is_named_and_may_be_skipped(place: Path) -> None:
    (place / "more/1.png").write_bytes(b"no image")
    with pytest.raises(UsageError) as caught:
        run(config(place, dataset=more(place), max_steps=1))
    assert "more" in caught.value.where
    assert "metadata.json:2:image" in str(caught.value)
    run(config(place, dataset=more(place), max_steps=1, on_bad_sample="skip"))
    listed = (place / "out/logs/bad_samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in listed] == [2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", r"--dataset 1: is not JSON"),
        ("[]", r"--dataset 1: is not an object"),
        ('{"repeats": 2}', r"--dataset 1: dataset_base_path: is required"),
        ('{"dataset_base_path": "a", "repeat": 2}', r"did you mean 'repeats'"),
        ('{"dataset_base_path": "a", "repeats": 0}', r"1: repeats: expected 1 or more"),
        ('{"dataset_base_path": "a", "loss_weight": -1}', r"loss_weight: expected 0"),
        ('{"dataset_base_path": "a", "flip": "maybe"}', r"1: flip: expected bool"),
        ('{"dataset_base_path": "a", "seed": 2}', r"has no option 'seed'"),
        ('{"dataset_base_path": "none"}', r"none does not exist"),
        ('{"dataset_base_path": "a", "bucket_step": 8}', r"--dataset 1: --bucket_step"),
    ],
)
def test_a_wrong_dataset_is_refused_with_its_number(
    place: Path, text: str, reason: str
) -> None:
    with pytest.raises(DstrainError, match=reason):
        run(config(place, dataset=(text,), max_steps=1))


def test_a_file_has_a_table_for_each_and_a_path_may_be_repeated(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "run.toml").write_text(
        f"""
        model = "tiny"
        model_paths = '{json.dumps(list(weights_of(place / "model").values()))}'
        max_steps = 6
        lora_rank = 2

        [[dataset]]
        dataset_base_path = "data"

        [[dataset]]
        dataset_base_path = "more"
        repeats = 2
        flip = true
        """
    )
    assert main(["--config", "run.toml", "--output_path", "one"]) == 0
    written = json.loads((place / "one/logs/config.json").read_text())
    assert [json.loads(one)["dataset_base_path"] for one in written["dataset"]] == [
        "data",
        "more",
    ]
    # What a run wrote is the same run again.
    again = ["--config", "one/logs/config.json", "--output_path", "two"]
    assert main(again) == 0
    assert same(files(place / "one"), files(place / "two"))
    paths = ["--dataset_base_path", "data", "--dataset-base-path=more"]
    three = ["--output_path", "three", "--max_steps", "6"]
    model = ["--model", "tiny", "--model_paths", written["model_paths"]]
    assert main([*model, *paths, *three, "--lora_rank", "2"]) == 0
    steps = {row["step"] for row in log(place / "three")}
    assert steps == set(range(1, 7))
