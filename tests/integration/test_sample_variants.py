"""Captions, flips, crops and resolutions: each draw of an unsplit run is that of the two
stages, bit for bit, and the feature cache stores what these need and no more.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import SampleKey, TrainConfig, run
from dstrain.cache import stored_plans
from dstrain.errors import CacheError
from dstrain.runs import open_training_data
from dstrain.runs.prompt_rows import plan_rows
from dstrain.runs.resolve import resolve
from PIL import Image

from tests.support.family import write
from tests.support.runs import config, files, log, same
from tests.support.toys import dataset

pytestmark = pytest.mark.usefixtures("tiny")

SIZES = ((16, 40), (40, 16), (24, 24), (30, 50))
CAPTIONS: tuple[Any, ...] = (
    "a, b, c, d",
    ["one dog", "two, dogs"],
    "",
    "first line\nsecond line",
)
FEATURES: dict[str, dict[str, Any]] = {
    "dropout": {"caption_dropout": 0.4},
    "tags": {"shuffle_tags": True, "keep_tags": 1, "caption_variants": 9},
    "words": {"trigger_word": "sks", "caption_prefix": "< ", "caption_suffix": " >"},
    "lines": {"caption_lines": True},
    "flip": {"flip": True},
    "crops": {"crops": 3, "height": 16, "width": 16},
    "crops, flip and masks": {
        "crops": 3,
        "flip": True,
        "height": 16,
        "width": 16,
        "mask_column": "mask",
    },
    "buckets": {"resolution": "24"},
    "resolutions": {"resolution": "16,24"},
    "all": {
        "caption_dropout": 0.2,
        "shuffle_tags": True,
        "caption_variants": 2,
        "caption_lines": True,
        "flip": True,
        "crops": 2,
        "resolution": "16,24",
        "batch_size": 2,
    },
}


@pytest.mark.parametrize(("family", "variant"), [("flux", "fill"), ("flux2", "dev")])
def test_a_variant_without_guidance_has_captions_too(family: str, variant: str) -> None:
    given: dict[str, Any] = {"model": family, "variant": variant, "toy": True}
    given |= {"dataset_base_path": dataset(family, variant), "output_path": Path("out")}
    setup = resolve(TrainConfig(**given, caption_dropout=0.4, trigger_word="sks"))
    assert setup.data_config.caption_inputs == {"prompt"}


def test_a_preview_of_an_edit_has_the_size_of_its_row(tmp_path: Path) -> None:
    """Not that of the image to edit, as in inference."""
    for name, sides in (("made", (64, 48)), ("edited", (100, 75))):
        Image.new("RGB", sides).save(tmp_path / f"{name}.png")
    table = "image,prompt,edit_image\nmade.png,a,edited.png\n"
    (tmp_path / "metadata.csv").write_text(table)
    given: dict[str, Any] = {"model": "flux2", "variant": "klein", "toy": True}
    given |= {"dataset_base_path": tmp_path, "output_path": tmp_path / "out"}
    given |= {"extra_inputs": "edit_image", "data_file_keys": "image,edit_image"}
    setup = resolve(TrainConfig(**given, height=32, width=48, preview_prompt=("b",)))
    (plan,) = plan_rows(setup)
    assert (plan.cells["height"].literal, plan.cells["width"].literal) == (32, 48)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and images of several sizes with captions of every kind."""
    folder = tmp_path_factory.mktemp("variants")
    write(folder / "model")
    data = folder / "data"
    data.mkdir()
    numbers = np.random.default_rng(0)
    rows = []
    for number, (size, caption) in enumerate(zip(SIZES, CAPTIONS, strict=True)):
        pixels = numbers.integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(data / f"{number}.png")
        Image.fromarray(pixels[..., 0]).save(data / f"red-{number}.png")
        row = {"image": f"{number}.png", "prompt": caption, "mask": f"red-{number}.png"}
        rows.append(row)
    (data / "metadata.json").write_text(json.dumps(rows))
    return folder


@pytest.mark.parametrize("name", FEATURES)
def test_unsplit_and_split_runs_are_equal(
    name: str, place: Path, tmp_path: Path
) -> None:
    changes = {"max_steps": 12, "validation_split": 0.3, **FEATURES[name]}
    run(config(place, output_path=tmp_path / "unsplit", **changes))
    cache = tmp_path / "cache"
    for stage in ("data_process", "train"):
        task = {"task": f"sft:{stage}", "feature_cache": cache}
        run(config(place, output_path=tmp_path / "split", **task, **changes))
    assert same(files(tmp_path / "unsplit"), files(tmp_path / "split"))
    assert log(tmp_path / "unsplit") == log(tmp_path / "split")


def drawn(place: Path, row: int, draws: int, **feature: Any) -> Counter[Any]:
    """How often each caption and view of a row is drawn."""
    setup = resolve(config(place, **feature))
    source = open_training_data(setup).source
    seen: Counter[Any] = Counter()
    for repeat in range(draws):
        sample = source.sample(row, key=SampleKey(0, 0, repeat, row))
        pixels = np.asarray(sample.values["input_image"]).tobytes()
        seen[sample.values["prompt"], pixels] += 1
    return seen


def test_variants_are_drawn_as_often_as_they_are_probable(place: Path) -> None:
    seen = drawn(place, 1, 4000, caption_dropout=0.2, flip=True)
    of_texts: Counter[str] = Counter()
    of_views: Counter[bytes] = Counter()
    for (text, pixels), count in seen.items():
        of_texts[text] += count
        of_views[pixels] += count
    assert of_texts.keys() == {"one dog", "two, dogs", ""}
    # Six standard deviations of a binomial distribution.
    assert abs(of_texts[""] - 800) < 6 * 25.3
    assert abs(of_texts["one dog"] - 1600) < 6 * 31
    assert len(of_views) == 2
    assert abs(max(of_views.values()) - 2000) < 6 * 31.6


def test_a_key_chooses_the_same_variant_each_time(place: Path) -> None:
    feature = {"crops": 4, "flip": True, "caption_dropout": 0.5, "resolution": "16"}
    assert drawn(place, 0, 50, **feature) == drawn(place, 0, 50, **feature)
    assert len(drawn(place, 0, 200, **feature)) == 4 * 2 * 2


def test_the_cache_has_each_text_and_each_view_once(
    place: Path, tmp_path: Path
) -> None:
    """Dropped captions of all rows are one empty prompt; texts and images are stored for
    themselves, not for each pair of them.
    """
    changes = {"caption_dropout": 0.1, "flip": True, "feature_cache": tmp_path}
    run(config(place, task="sft:data_process", **changes))
    (plan,) = stored_plans(tmp_path)
    rows = plan.samples()
    addresses = {name: set(map(bytes, column)) for name, column in rows.stored.items()}
    # Row 1 has two captions; row 2 is empty itself.
    texts = {"a, b, c, d", "one dog", "two, dogs", "", CAPTIONS[3]}
    assert len(addresses["prompt_emb"]) == len(texts)
    assert len(addresses["input_latents"]) == 2 * len(SIZES)
    assert len(rows) == 2 * (2 + 3 + 1 + 2)


def test_stage_2_refuses_other_variants(place: Path, tmp_path: Path) -> None:
    cache = {"feature_cache": tmp_path / "cache"}
    run(config(place, task="sft:data_process", caption_dropout=0.1, **cache))
    for other in ({}, {"caption_dropout": 0.2}, {"caption_dropout": 0.1, "flip": True}):
        with pytest.raises(CacheError, match=r"--caption_dropout|--flip"):
            run(config(place, task="sft:train", max_steps=1, **cache, **other))


@pytest.mark.parametrize("crops", [2, 3, 4])
def test_validation_sees_the_centre_of_any_number_of_crops(
    crops: int, place: Path, tmp_path: Path
) -> None:
    size = {"height": 16, "width": 16, "validation_split": 0.3, "max_steps": 1}
    plain = run_with_validation(place, tmp_path / "plain", size)
    feature = {**size, "crops": crops, "flip": True}
    assert run_with_validation(place, tmp_path / "crops", feature) == plain
    cache = tmp_path / "cache"
    run(config(place, task="sft:data_process", feature_cache=cache, **feature))
    split = {**feature, "task": "sft:train", "feature_cache": cache}
    assert run_with_validation(place, tmp_path / "split", split) == plain


def run_with_validation(place: Path, output: Path, changes: dict[str, Any]) -> str:
    """Return the validation loss before the first step, as it is written."""
    run(config(place, output_path=output, **changes))
    rows = (output / "logs/validation.csv").read_text().splitlines()
    return rows[1]


def test_crops_lie_evenly_between_the_ends(tmp_path: Path) -> None:
    write(tmp_path / "model")
    (tmp_path / "data").mkdir()
    columns = np.repeat(np.arange(64, dtype=np.uint8)[np.newaxis], 16, axis=0)
    Image.fromarray(columns).save(tmp_path / "data/ramp.png")
    rows = [{"image": "ramp.png", "prompt": "a ramp"}]
    (tmp_path / "data/metadata.json").write_text(json.dumps(rows))
    feature = {"crops": 3, "height": 16, "width": 16, "flip": True}
    seen = drawn(tmp_path, 0, 200, **feature)
    edges = set()
    for _, pixels in seen:
        row = np.frombuffer(pixels, np.uint8).reshape(16, 16, 3)[0, :, 0]
        edges.add((int(row[0]), int(row[-1])))
    # 48 columns are cut off, at both sides together.
    assert edges == {(8, 23), (24, 39), (40, 55), (23, 8), (39, 24), (55, 40)}
