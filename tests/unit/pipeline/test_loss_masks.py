"""Masks weight the loss of any family; without them, nothing changes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import SFT, SampleKey, StateError, Task, UsageError
from dstrain.graph import make_plan
from dstrain.pipeline import MASK, Masks, check_masks, with_masks
from dstrain.plugin import Column
from dstrain.storage import tensor_shapes
from PIL import Image
from torch import Tensor

from tests.support.family import build
from tests.support.runs import config, project, same, train, training_run

BY_COLUMN = Masks("mask", False, 0.0)


def mask_of(pixels: Any) -> Image.Image:
    return Image.fromarray(np.asarray(pixels, np.uint8))


def noise_mask(seed: int, height: int = 16, width: int = 16) -> Image.Image:
    rng = np.random.default_rng(seed)
    return mask_of(rng.integers(0, 256, (height, width)))


def write_masks(folder: Path, masks: Sequence[Image.Image | None]) -> None:
    """Give each row of a project a mask, or a blank cell."""
    table = folder / "data/metadata.json"
    rows = json.loads(table.read_text())
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        row["mask"] = ""
        if mask is not None:
            row["mask"] = f"mask-{number}.png"
            mask.save(folder / "data" / row["mask"])
    table.write_text(json.dumps(rows))


def write_alpha(folder: Path, masks: Sequence[Image.Image | None]) -> None:
    """Give each image of a project an alpha channel, or leave it."""
    for number, mask in enumerate(masks):
        path = folder / f"data/{number}.png"
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        if mask is not None:
            image.putalpha(mask)
        image.save(path)


def noise_masks(blank: tuple[int, ...] = ()) -> list[Image.Image | None]:
    """Masks for the six images of a project, which are of two sizes in turn."""
    return [
        None if row in blank else noise_mask(row, 16, 24 if row % 2 else 16)
        for row in range(6)
    ]


@pytest.fixture
def here(tiny: Path, tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def losses(folder: Path, rows: Sequence[int], **flags: Any) -> Tensor:
    found = training_run(config(folder, **flags))
    keys = [SampleKey(0, 0, 0, row) for row in rows]
    samples = [found.data.source.sample(row) for row in rows]
    return found.module.losses(samples, keys).detach()


def weighed(mask: Image.Image, unmasked_weight: float, *shape: int) -> Tensor:
    """What the unit of a variant makes of a mask, for latents of this shape."""

    def of_size(height: int, width: int) -> tuple[int, ...]:
        return (*shape[:-2], height, width)

    spec = replace(build("base"), latent_shape=of_size)
    unit = with_masks(spec, SFT, BY_COLUMN).units[-1]
    assert unit.name == "weigh_latents"
    assert unit.inputs.keys() == {MASK, "unmasked_weight", "height", "width"}
    sides = {"height": shape[-2], "width": shape[-1]}
    values = {MASK: mask, "unmasked_weight": unmasked_weight, **sides}
    weight: Tensor = unit.run(values, {})["loss_weight"]
    return weight


def test_a_position_has_the_mean_of_its_part_of_the_mask() -> None:
    pixels = np.zeros((4, 6), np.uint8)
    pixels[:2, :2] = 255
    pixels[2, 2] = 255
    weight = weighed(mask_of(pixels), 0.0, 1, 4, 2, 3)
    assert weight.dtype == torch.float32
    assert weight.tolist() == [[[[1.0, 0.0, 0.0], [0.0, 0.25, 0.0]]]]


def test_latents_without_sides_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\[1, 4, 6\]"):
        weighed(noise_mask(0), 0.0, 1, 4, 6)


def no_weight(predict: Any, input_latents: Tensor) -> Tensor: ...


@pytest.mark.parametrize(
    ("column", "task", "masks", "said"),
    [
        (None, Task.of("mine", no_weight), BY_COLUMN, "mine(.|\n)*loss_weight"),
        (Column("video", "video", multiple=8), SFT, Masks(None, True), "--mask_column"),
        (Column("image", "images", multiple=8), SFT, BY_COLUMN, "input_latents"),
    ],
)
def test_what_cannot_be_masked_is_refused(
    column: Column | None, task: Task, masks: Masks, said: str
) -> None:
    spec = build("base")
    if column is not None:
        spec = replace(spec, inputs={**spec.inputs, "input_image": column})
    with pytest.raises(UsageError, match=said) as refused:
        with_masks(spec, task, masks)
    assert refused.value.where == masks.flag
    if column is not None and column.kind == "video":
        assert with_masks(spec, SFT, BY_COLUMN).inputs[MASK].of == "input_image"


def test_a_variant_whose_latents_have_no_known_size_is_refused() -> None:
    spec = with_masks(build("base"), SFT, BY_COLUMN)
    absent = frozenset({"prompt", "input_image", MASK})
    with pytest.raises(UsageError, match=r"masks: .*tiny base"):
        check_masks(make_plan(spec, absent, SFT, ("dit",)))


def test_a_mask_of_ones_and_no_mask_change_no_bit(here: Path) -> None:
    white = [mask_of(np.full((16, 24 if row % 2 else 16), 255)) for row in range(6)]
    write_masks(here, [*white[:5], None])
    for rows in ([0, 2], [1, 3], [5]):
        assert same(losses(here, rows), losses(here, rows, mask_column="mask"))


def test_an_alpha_channel_is_the_mask_of_its_image(here: Path) -> None:
    """Opaque images are the same over white as without an alpha channel."""
    for row in range(6):
        with Image.open(here / f"data/{row}.png") as opened:
            Image.new("RGB", opened.size, "white").save(here / f"data/{row}.png")
    masks = noise_masks(blank=(5,))
    write_masks(here, masks)
    by_column = losses(here, [0, 2], mask_column="mask")
    write_alpha(here, masks)
    assert same(losses(here, [0, 2], alpha_mask=True), by_column)


def stage_1(here: Path, **flags: Any) -> int:
    """Fill the cache; return how many values were added."""
    shards = here / "cache/shards"

    def stored() -> int:
        return sum(len(tensor_shapes(path)) for path in shards.glob("*.safetensors"))

    before = stored()
    train(here, task="sft:data_process", feature_cache=here / "cache", **flags)
    return stored() - before


def test_masks_and_their_weight_compute_only_masks_anew(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_masks(here, noise_masks())
    assert stage_1(here) == 6 * len(["latents", "embedding", "its mask"])
    assert "text_encoder, tokenizer, vae" in capsys.readouterr().err
    assert stage_1(here, mask_column="mask") == 6
    assert stage_1(here, mask_column="mask", unmasked_weight=0.5) == 6
    assert stage_1(here) == stage_1(here, mask_column="mask") == 0
    noise_mask(9).save(here / "data/mask-0.png")
    assert stage_1(here, mask_column="mask") == 1
    assert "text_encoder" not in capsys.readouterr().err.replace(
        "model/text_encoder", ""
    )


def test_stage_2_says_which_masks_the_cache_was_filled_with(here: Path) -> None:
    write_masks(here, noise_masks())
    stage_1(here, mask_column="mask")
    second = {"task": "sft:train", "feature_cache": here / "cache", "max_steps": 1}
    for flags, difference in (
        ({"mask_column": "mask", "unmasked_weight": 0.5}, r"--unmasked_weight: .*0\.5"),
        ({}, "weigh_latents"),
    ):
        with pytest.raises(StateError, match=difference):
            train(here, **second, **flags)
    train(here, **second, mask_column="mask")


def test_a_student_is_compared_where_its_mask_is(here: Path) -> None:
    write_masks(here, noise_masks())
    table = here / "data/metadata.json"
    given = {"seed": 1, "num_inference_steps": 2}
    rows = [{**row, **given} for row in json.loads(table.read_text())]
    table.write_text(json.dumps(rows))
    plain = losses(here, [0, 2], task="direct_distill")
    masked = losses(here, [0, 2], task="direct_distill", mask_column="mask")
    assert (plain != masked).all()
