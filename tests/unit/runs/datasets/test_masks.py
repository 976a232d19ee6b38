"""Each of several datasets has masks of its own, or none, and trains the same split and
unsplit.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import SFT, StateError, UsageError, run
from dstrain.config import validate
from dstrain.data import load_cell
from dstrain.errors import CacheError
from dstrain.graph import MaskColumn
from dstrain.pipeline import Masks
from dstrain.plugin import Constant
from dstrain.runs import open_training_data
from dstrain.runs.checks.rows import warnings_of_rows
from dstrain.runs.datasets.masks import (
    masks_of,
    other_masks,
    with_masks_of_run,
)
from dstrain.runs.resolve import resolve
from PIL import Image

from tests.support.family import build
from tests.support.runs import config, files, log, project, same

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
    """A model, six images with masks in a column `mask` but for one of them, and six more
    with masks in a column `shape`.
    """
    project(tmp_path)
    project(tmp_path / "second")
    (tmp_path / "second/data").rename(tmp_path / "more")
    add_masks(tmp_path / "data", "mask", blank=(2,))
    add_masks(tmp_path / "more", "shape")
    return tmp_path


def entry(place: Path, folder: str = "more", **options: Any) -> str:
    return json.dumps({"dataset_base_path": str(place / folder), **options})


def masks_in(place: Path, **changes: Any) -> dict[int, tuple[str, float]]:
    """Return row -> its mask and the weight of what that leaves out, of those that have
    a mask.
    """
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


def test_an_alpha_channel_takes_the_place_of_a_column_and_the_other_way_round(
    place: Path,
) -> None:
    for number in range(6):
        with Image.open(place / f"more/{number}.png") as opened:
            image = opened.convert("RGBA")
        image.putalpha(128)
        image.save(place / f"more/{number}.png")
    of_alpha = {row + 6: (f"{row}.png", 0.0) for row in range(6)}
    of_first = {row: (f"mask-{row}.png", 0.0) for row in (0, 1, 3, 4, 5)}
    alpha = entry(place, alpha_mask=True)
    found = masks_in(place, mask_column="mask", dataset=(alpha,))
    assert found == of_first | of_alpha
    column = entry(place, "data", mask_column="mask")
    found = masks_in(
        place, dataset_base_path=place / "more", alpha_mask=True, dataset=(column,)
    )
    assert found == {row - 6: mask for row, mask in of_alpha.items()} | {
        row + 6: mask for row, mask in of_first.items()
    }
    assert masks_in(
        place,
        dataset_base_path=place / "more",
        alpha_mask=True,
        dataset=(entry(place, alpha_mask=False),),
    ) == {row - 6: mask for row, mask in of_alpha.items()}


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
    changes: dict[str, Any] = {
        **of_run,
        "dataset": (entry(place, **own),),
        "max_steps": 6,
        "batch_size": 2,
        "validation_split": 0.3,
    }
    run(config(place, output_path=place / "unsplit", **changes))
    for stage in ("data_process", "train"):
        task = {"task": f"sft:{stage}", "feature_cache": place / "cache"}
        run(config(place, output_path=place / "split", **task, **changes))
    assert same(files(place / "unsplit"), files(place / "split"))
    assert log(place / "unsplit") == log(place / "split")
    tables = [place / one / "logs/validation.csv" for one in ("split", "unsplit")]
    assert tables[0].read_text() == tables[1].read_text()
    # Without the first dataset, from the cache alone.
    alone = {**changes, "dataset_base_path": None, "feature_cache": place / "cache"}
    run(config(place, output_path=place / "alone", task="sft:train", **alone))
    assert log(place / "alone") == log(place / "split")


def test_a_dataset_without_masks_trains_as_rows_with_blank_cells(place: Path) -> None:
    """It has the same inputs, and so the same batches."""
    add_masks(place / "more", "mask", blank=tuple(range(6)))
    by_column = entry(place, mask_column="mask"), entry(place, mask_column=None)
    outputs = [place / "blank", place / "none"]
    flags: dict[str, Any] = {"mask_column": "mask", "max_steps": 6, "batch_size": 2}
    run(config(place, output_path=outputs[0], dataset=(entry(place),), **flags))
    run(config(place, output_path=outputs[1], dataset=by_column[1:], **flags))
    assert log(outputs[0]) == log(outputs[1])
    with pytest.raises(UsageError, match="all values of column 'mask' are") as caught:
        run(config(place, dataset=by_column[:1], **flags))
    assert caught.value.where == "--dataset 1: --mask_column"


def test_a_single_dataset_keeps_its_values_where_it_is_one_of_two(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, Any] = {
        "task": "sft:data_process",
        "feature_cache": place / "cache",
    }
    run(config(place, mask_column="mask", unmasked_weight=0.5, **flags))
    run(config(place, dataset_base_path=place / "more", **flags))
    capfd.readouterr()
    own = entry(place, "data", mask_column="mask", unmasked_weight=0.5)
    run(config(place, dataset_base_path=None, dataset=(own, entry(place)), **flags))
    assert "precomputing 0 of 12 samples" in capfd.readouterr().err


def test_the_cache_knows_the_masks_of_each_dataset(place: Path) -> None:
    flags: dict[str, Any] = {"feature_cache": place / "cache"}
    own = {"mask_column": "shape", "unmasked_weight": 0.5}
    run(config(place, task="sft:data_process", dataset=(entry(place, **own),), **flags))
    for other, said in (
        ({**own, "unmasked_weight": 0.25}, "1 unmasked_weight: cache 0.5, this run 0."),
        ({}, "--dataset 1 mask_column: cache shape, this run nothing"),
    ):
        with pytest.raises(CacheError) as caught:
            changed = (entry(place, **other),)
            run(config(place, task="sft:train", dataset=changed, max_steps=1, **flags))
        assert said in " ".join(caught.value.help_lines)


def test_a_run_resumes_with_the_masks_of_each_dataset(place: Path) -> None:
    own = {"mask_column": "shape", "unmasked_weight": 0.5}

    def start(steps: int, **options: Any) -> None:
        dataset = (entry(place, **options),)
        run(config(place, dataset=dataset, max_steps=steps, resume="auto"))

    start(1, **own)
    start(2, **own)
    with pytest.raises(StateError, match="different settings"):
        start(3, **{**own, "unmasked_weight": 0.25})


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


def test_rows_without_a_mask_are_counted_in_each_dataset_with_masks(
    place: Path,
) -> None:
    add_masks(place / "more", "shape", blank=(0, 1))
    own = entry(place, mask_column="shape")
    lines = warnings_of_rows(resolve(config(place, dataset=(own,))))
    assert [line for line in lines if "mask: the loss" in line] == [
        f"{place}/more/metadata.json: 2 of 6 rows have no mask: the loss counts all of them"
    ]
    both = {"mask_column": "mask", "dataset": (entry(place),)}
    lines = warnings_of_rows(resolve(config(place, **both)))
    assert [line.split(": ")[1] for line in lines if "mask: the loss" in line] == [
        *("1 of 6 rows have no mask", "6 of 6 rows have no mask")
    ]


def test_a_black_mask_is_refused_by_the_name_of_its_own_column(place: Path) -> None:
    Image.new("L", SIZES[1]).save(place / "more/shape-3.png")
    own = entry(place, mask_column="shape")
    flags: dict[str, Any] = {"mask_column": "mask", "dataset": (own,)}
    source = open_training_data(resolve(config(place, **flags))).source
    with pytest.raises(UsageError, match="masks out the whole image") as caught:
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


@pytest.mark.parametrize(
    ("own", "where", "what"),
    [
        ({"mask_column": "shap"}, "--dataset 1: --mask_column", "mean 'shape'"),
        ({"mask_column": " "}, "--dataset 1: --mask_column", "is empty"),
        (
            {"mask_column": "shape", "alpha_mask": True},
            "--dataset 1: --alpha_mask",
            "cannot be combined with --mask_column",
        ),
        (
            {"unmasked_weight": 0.5},
            "--dataset 1: --unmasked_weight",
            "has no effect without",
        ),
        (
            {"mask_column": "shape", "unmasked_weight": 1},
            "--dataset 1: unmasked_weight",
            "less than 1",
        ),
        ({"alpha_mask": True}, "--dataset 1: --alpha_mask", "no image in column"),
    ],
)
def test_wrong_masks_of_a_dataset_are_refused_with_its_number(
    place: Path, own: dict[str, Any], where: str, what: str
) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        run(config(place, dataset=(entry(place, **own),), max_steps=1))
    assert caught.value.where == where


def test_a_weight_of_the_run_has_an_effect_where_a_dataset_has_masks() -> None:
    own = json.dumps({"dataset_base_path": "more", "mask_column": "shape"})
    given = config(Path(), unmasked_weight=0.5, dataset=(own,), toy=True)
    validate(given)
    with pytest.raises(UsageError, match="has no effect without --mask_column"):
        validate(config(Path(), unmasked_weight=0.5, dataset=(), toy=True))


def test_the_variant_has_the_masks_of_the_first_that_asks_for_any() -> None:
    own = json.dumps(
        {"dataset_base_path": "a", "mask_column": "shape", "unmasked_weight": 0.5}
    )
    given = config(Path(), toy=True, dataset=(own,))
    assert masks_of(given) == Masks()
    assert other_masks(given) == {"--dataset 1": ["shape", False, 0.5]}
    spec = with_masks_of_run(build("base"), SFT, given)
    assert spec.inputs["loss_mask"] == MaskColumn(
        "shape", "image", mode="L", of="input_image", not_empty=True
    )
    # Which is one of the run's numbers: each dataset has its own.
    assert spec.inputs["unmasked_weight"] == Constant(0.0)
    plain = config(Path(), toy=True, dataset=(json.dumps({"dataset_base_path": "a"}),))
    base = build("base")
    assert with_masks_of_run(base, SFT, plain) is base
    assert other_masks(plain) == {}
