"""Several datasets in one run: their rows follow each other, each read with options of its
own, in both ways of training alike.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import DstrainError, UsageError, run
from dstrain.cli.main import main
from dstrain.errors import CacheError
from dstrain.runs import Setup
from dstrain.runs.resolve import resolve
from dstrain.runs.stage_1 import plan_writer
from PIL import Image

from tests.support.family import weights_of, write
from tests.support.runs import config, files, log, same, train_both_ways, training_run

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
            sample = run.data.source.sample(key.row, key.chunk, key=key)
            prompts[sample.values["prompt"]] += 1
    return prompts


def test_each_row_of_each_dataset_is_drawn_as_often_as_its_repeats_say(
    place: Path,
) -> None:
    found = draws(place, dataset=more(place, repeats=3), dataset_repeat=2)
    expected = {f"data {number}": 2 for number in range(4)}
    expected |= {f"more {number}": 6 for number in range(3)}
    assert found == expected


def test_a_single_table_trains_from_a_feature_cache(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"dataset_base_path": None, "dataset": more(place)}
    changes |= {"max_steps": 2, "dataset_repeat": 2}
    cached: dict[str, Any] = {**changes, "feature_cache": place / "cache"}
    run(config(place, output_path=place / "unsplit", **changes))
    run(config(place, task="sft:data_process", **cached))
    run(config(place, output_path=place / "split", task="sft:train", **cached))
    capfd.readouterr()
    run(config(place, output_path=place / "both", **cached))
    assert "precomputing 0 of 3 samples" in capfd.readouterr().err
    for name in ("split", "both"):
        assert log(place / name) == log(place / "unsplit")


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
    flags = {"max_steps": 12, "batch_size": 2, "caption_dropout": 0.2}
    train_both_ways(place, dataset=more(place, **own), **flags)


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
    beside = {"dataset": more(place, loss_weight=0), "num_epochs": 1}
    found = log(run(config(place, output_path=place / "beside", **beside)).folder)
    assert [row["loss"] == 0 for row in found].count(True) == 3


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


def test_stage_2_compares_the_datasets_that_it_names(place: Path) -> None:
    """Also where it leaves out that of --dataset_base_path."""
    changes: dict[str, Any] = {"feature_cache": place / "cache", "max_steps": 1}
    changes["dataset"] = (*more(place), *more(place, flip=True))
    run(config(place, task="sft:data_process", **changes))
    changes |= {"task": "sft:train", "dataset_base_path": None}
    run(config(place, output_path=place / "first", **changes))
    rows = (place / "more/metadata.json").read_text()
    (place / "more/metadata.json").write_text(rows.replace("more 1", "another"))
    for base in (place / "data", None):
        with pytest.raises(CacheError, match="has changed") as caught:
            run(config(place, **{**changes, "dataset_base_path": base}))
        assert caught.value.where == str(place / "more/metadata.json")
    (place / "more/metadata.json").write_text(rows)
    run(config(place, output_path=place / "second", **changes))


def test_a_file_of_two_datasets_is_compared_where_one_of_them_is_named(
    place: Path,
) -> None:
    again = json.dumps({"dataset_base_path": str(place / "data"), "flip": True})
    changes: dict[str, Any] = {"feature_cache": place / "cache", "max_steps": 1}
    changes["dataset"] = (again,)
    run(config(place, task="sft:data_process", **changes))
    pixels = np.full((24, 40, 3), 9, np.uint8)
    Image.fromarray(pixels).save(place / "data/1.png")
    for base in (place / "data", None):
        given = {**changes, "task": "sft:train", "dataset_base_path": base}
        with pytest.raises(CacheError, match="has changed") as caught:
            run(config(place, **given))
        assert caught.value.where == str(place / "data/1.png")


def test_a_plan_without_digests_of_its_datasets_is_still_trained_from(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions wrote it."""
    written = plan_writer.part_records

    def as_before(setup: Setup) -> list[dict[str, Any]]:
        return [{"path": one["path"], "rows": one["rows"]} for one in written(setup)]

    monkeypatch.setattr(plan_writer, "part_records", as_before)
    changes: dict[str, Any] = {"feature_cache": place / "cache", "max_steps": 1}
    changes["dataset"] = more(place)
    run(config(place, task="sft:data_process", **changes))
    changes |= {"task": "sft:train", "dataset_base_path": None}
    run(config(place, **changes))
    assert len(log(place / "out")) == 1


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
        (
            '{"dataset_base_path": "none"}',
            r"--dataset 1: --dataset_base_path: none is not a folder",
        ),
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


OWN = {
    "trigger_word": "sks",
    "repeats": 2,
    "resolution": 16,
    "column": ["prompt=prompt", "input_image=image"],
}


@pytest.mark.parametrize(
    "other",
    [
        {"trigger_word": "other"},
        {"caption_prefix": "old "},
        {"caption_dropout": 0.5},
        {"flip": True},
        {"resolution": 24},
        {"repeats": 3},
        {"loss_weight": 0.5},
        {"column": ["prompt=note"]},
    ],
)
def test_a_run_is_not_resumed_with_other_options_of_a_dataset(
    place: Path, other: dict[str, Any]
) -> None:
    rows = json.loads((place / "more/metadata.json").read_text())
    noted = [{**row, "note": row["prompt"]} for row in rows]
    (place / "more/metadata.json").write_text(json.dumps(noted))
    own = {**OWN, "dataset_base_path": str(place / "more")}
    run(config(place, dataset=(json.dumps(own),), max_steps=1))
    changed = (json.dumps({**own, **other}),)
    with pytest.raises(DstrainError) as caught:
        run(config(place, dataset=changed, max_steps=2, resume="auto"))
    (name,) = other
    assert caught.value.where == "--resume"
    assert caught.value.what.endswith(": dataset")
    now = json.loads(caught.value.help_lines[1].removeprefix("this run: "))
    assert name in json.loads(now["dataset"][0])
    # Written in another way, and elsewhere, it is the same run.
    (place / "more").rename(place / "moved")
    own["dataset_base_path"] = str(place / "moved")
    texts = {**dict(reversed(own.items())), "repeats": "2", "resolution": "16"}
    texts["column"] = ["input_image=image,prompt=prompt"]
    run(config(place, dataset=(json.dumps(texts),), max_steps=2, resume="auto"))
    assert len(log(place / "out")) == 2


def captions(folder: Path) -> None:
    """Two images, one of which has a caption."""
    images(folder, 2, 0)
    (folder / "metadata.json").unlink()
    (folder / "0.txt").write_text("a caption")


def test_a_default_caption_is_for_those_datasets_that_are_folders_of_captions(
    place: Path,
) -> None:
    captions(place / "notes")
    notes = json.dumps({"dataset_base_path": str(place / "notes")})
    found = draws(place, dataset=(notes,), default_caption="none")
    assert found["a caption"] == found["none"] == 1
    with pytest.raises(UsageError) as caught:
        resolve(config(place, dataset=more(place), default_caption="none"))
    assert caught.value.where == "--default_caption"
    second = {"validation_dataset_base_path": place / "notes"}
    resolve(config(place, dataset=more(place), default_caption="none", **second))
    own = (notes, *more(place, default_caption="none"))
    with pytest.raises(UsageError) as caught:
        resolve(config(place, dataset=own))
    assert caught.value.where == "--dataset 2: --default_caption"


def test_a_dataset_that_is_gone_is_named_before_stage_1(place: Path) -> None:
    changes: dict[str, Any] = {"dataset": more(place), "max_steps": 1}
    changes["feature_cache"] = place / "cache"
    run(config(place, **changes))
    (place / "more").rename(place / "gone")
    with pytest.raises(UsageError) as caught:
        run(config(place, **changes, overwrite=True))
    assert caught.value.where == "--dataset 1: --dataset_base_path"
