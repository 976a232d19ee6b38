"""Each of several datasets has masks of its own, or none, the same split and unsplit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import UsageError, run
from dstrain.data import load_cell
from dstrain.errors import CacheError
from dstrain.runs import open_training_data
from dstrain.runs.resolve import resolve
from PIL import Image

from tests.support.runs import config, log, project, train_both_ways

pytestmark = pytest.mark.usefixtures("tiny")

SIZES = ((16, 16), (24, 16))
"""Of the images of a project in turn, as Pillow has them."""


def add_masks(folder: Path, column: str, blank: tuple[int, ...] = ()) -> None:
    """Give the rows of a dataset masks of noise."""
    table = folder / "metadata.json"
    rows = json.loads(table.read_text())
    numbers = np.random.default_rng(0)
    for number, row in enumerate(rows):
        width, height = SIZES[number % 2]
        pixels = numbers.integers(0, 256, (height, width), np.uint8)
        row[column] = "" if number in blank else f"{column}-{number}.png"
        if row[column]:
            Image.fromarray(pixels).save(folder / row[column])
    table.write_text(json.dumps(rows))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Six images with masks in `mask` but for one of them, and six with masks in `shape`."""
    project(tmp_path)
    project(tmp_path / "second")
    (tmp_path / "second/data").rename(tmp_path / "more")
    add_masks(tmp_path / "data", "mask", blank=(2,))
    add_masks(tmp_path / "more", "shape")
    return tmp_path


def entry(place: Path, folder: str = "more", **options: Any) -> str:
    return json.dumps({"dataset_base_path": str(place / folder), **options})


def masks_in(place: Path, **changes: Any) -> dict[int, tuple[str, float]]:
    """Row -> its mask and the weight of what that leaves out."""
    dataset = resolve(config(place, **changes)).dataset
    found = {}
    for (row, _), cells in zip(dataset.sample_ids.tolist(), dataset.rows, strict=True):
        if "loss_mask" in cells:
            name = Path(cells["loss_mask"].files[0]).name
            found[row] = name, cells["unmasked_weight"].literal
    return found


def test_each_dataset_has_its_own_masks_or_those_of_the_run(place: Path) -> None:
    of_first = {row: (f"mask-{row}.png", 0.25) for row in (0, 1, 3, 4, 5)}
    of_second = {row + 6: (f"shape-{row}.png", 0.5) for row in range(6)}
    run_masks: dict[str, Any] = {"mask_column": "mask", "unmasked_weight": 0.25}
    both = entry(place, mask_column="shape", unmasked_weight=0.5)
    assert masks_in(place, **run_masks, dataset=(both,)) == of_first | of_second
    # What it does not say is that of the run, but for a column that it lacks.
    assert masks_in(place, **run_masks, dataset=(entry(place),)) == of_first
    third = entry(place, "data", unmasked_weight=0.75)
    assert masks_in(place, **run_masks, dataset=(third,)) == of_first | {
        row + 6: (name, 0.75) for row, (name, _) in of_first.items()
    }
    # A dataset alone has masks, or none where the run has some.
    assert masks_in(place, dataset=(both,)) == of_second
    weight = {"unmasked_weight": 0.5}
    own = entry(place, mask_column="shape")
    assert masks_in(place, **weight, dataset=(own,)) == of_second
    none = entry(place, "data", mask_column=None)
    assert masks_in(place, **run_masks, dataset=(none,)) == of_first


CHOICES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"mask_column": "mask"}, {"mask_column": None}),
    ({}, {"mask_column": "shape", "unmasked_weight": 0.25}),
    (
        {"mask_column": "mask", "unmasked_weight": 0.5},
        {"mask_column": "shape", "unmasked_weight": 0.0},
    ),
)
"""Options of the run, with those of the second dataset."""


@pytest.mark.parametrize(("of_run", "own"), CHOICES)
def test_unsplit_and_split_runs_are_equal(
    place: Path, of_run: dict[str, Any], own: dict[str, Any]
) -> None:
    flags = {**of_run, "max_steps": 6, "batch_size": 2, "validation_split": 0.3}
    train_both_ways(place, dataset=(entry(place, **own),), **flags)
    tables = [place / one / "logs/validation.csv" for one in ("split", "unsplit")]
    assert tables[0].read_text() == tables[1].read_text()


def test_the_cache_knows_the_masks_of_each_dataset(place: Path) -> None:
    flags: dict[str, Any] = {"feature_cache": place / "cache"}
    own = {"mask_column": "shape", "unmasked_weight": 0.5}
    run(config(place, task="sft:data_process", dataset=(entry(place, **own),), **flags))
    for other, named in (
        ({**own, "unmasked_weight": 0.25}, r"1 unmasked_weight: .* 0\.5, .* 0\.25"),
        ({}, r"--dataset 1 mask_column: .* shape,"),
    ):
        changed = (entry(place, **other),)
        with pytest.raises(CacheError, match=named):
            run(config(place, task="sft:train", dataset=changed, max_steps=1, **flags))


def test_masks_of_validation_are_those_of_the_run(place: Path) -> None:
    """A second dataset has no masks that only a dataset of training has."""
    given: dict[str, Any] = {"validation_dataset_base_path": place / "data"}
    own = entry(place, mask_column="shape")
    setup = resolve(config(place, dataset=(own,), **given))
    assert setup.validation is not None
    assert "loss_mask" not in setup.validation.dataset.columns
    setup = resolve(config(place, mask_column="mask", dataset=(own,), **given))
    assert setup.validation is not None
    assert setup.validation.dataset.columns["loss_mask"].name == "mask"
    flags: dict[str, Any] = {"dataset": (own,), "max_steps": 2, **given}
    run(config(place, output_path=place / "unsplit", **flags))
    flags["feature_cache"] = place / "cache"
    run(config(place, output_path=place / "split", **flags))
    assert log(place / "unsplit") == log(place / "split")


def test_a_black_mask_is_refused_by_the_name_of_its_own_column(place: Path) -> None:
    Image.new("L", SIZES[1]).save(place / "more/shape-3.png")
    own = entry(place, mask_column="shape")
    flags: dict[str, Any] = {"mask_column": "mask", "dataset": (own,)}
    source = open_training_data(resolve(config(place, **flags))).source
    with pytest.raises(UsageError) as caught:
        source.sample(9)
    assert caught.value.where.endswith("metadata.json:4:shape")
    setup = resolve(config(place, on_bad_sample="skip", **flags))
    (place / "out/logs").mkdir(parents=True)
    assert [(fault.row, fault.column) for fault in setup.dataset.skipped] == [
        (9, "shape")
    ]
    # Where what is masked out counts a little in this dataset, nothing is bad.
    own = entry(place, mask_column="shape", unmasked_weight=0.1)
    rows = resolve(config(place, mask_column="mask", dataset=(own,))).dataset.rows
    assert load_cell(rows[9]["loss_mask"]).getextrema() == (0, 0)
