"""Masks weight the loss of any family, the same split and unsplit; without them, nothing
changes.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from dstrain import SFT, Pipeline, SampleKey, Task, UsageError
from dstrain.distributed import ProcessGroup
from dstrain.errors import CacheError
from dstrain.graph import FunctionSpec, MaskColumn, Step, make_plan
from dstrain.pipeline import MASK, Masks, check_masks, with_masks, with_masks_of_dataset
from dstrain.pipeline.loss_masks import MaskUnit, weigh_latents
from dstrain.plugin import Column, Constant, PipelineSpec
from dstrain.runs import Setup, data_process, open_training_data, recompute
from dstrain.runs.checks.rows import warnings_of_rows
from dstrain.runs.resolve import resolve
from dstrain.runs.stage_1 import computing
from dstrain.runs.stage_1.computing import compute_step
from PIL import Image
from torch import Tensor

from tests.support.family import PIPELINES, build
from tests.support.runs import config, log, project, same, train, training_run

SHAPE = (1, 4, 2, 3)
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
    """The losses of some rows, as one batch."""
    found = training_run(config(folder, **flags))
    keys = [SampleKey(0, 0, 0, row) for row in rows]
    samples = [found.data.source.sample(row) for row in rows]
    return found.module.losses(samples, keys).detach()


# The unit


def test_a_position_has_the_mean_of_its_part_of_the_mask() -> None:
    pixels = np.zeros((4, 6), np.uint8)
    pixels[:2, :2] = 255
    pixels[2, 2] = 255
    weight = weigh_latents(SHAPE, mask_of(pixels), 0.0)["loss_weight"]
    assert weight.dtype == torch.float32
    assert weight.tolist() == [[[[1.0, 0.0, 0.0], [0.0, 0.25, 0.0]]]]


def test_what_is_masked_out_has_the_unmasked_weight() -> None:
    pixels = np.array([[0, 255, 51]], np.uint8).repeat(2, 0)
    shape = (1, 4, 1, 3)
    weight = weigh_latents(shape, mask_of(pixels), 0.1)["loss_weight"]
    assert weight.flatten().tolist() == pytest.approx([0.1, 1.0, 0.28])
    assert weight.flatten()[1] == 1


def test_all_frames_have_one_mask() -> None:
    weight = weigh_latents((1, 16, 5, 2, 3), noise_mask(0, 4, 6), 0.0)["loss_weight"]
    assert weight.shape == (1, 1, 1, 2, 3)


def test_an_alpha_channel_is_a_mask() -> None:
    alpha = noise_mask(1, 4, 6)
    image = Image.new("RGB", alpha.size, "red")
    image.putalpha(alpha)
    assert same(weigh_latents(SHAPE, image, 0.2), weigh_latents(SHAPE, alpha, 0.2))


def test_latents_without_sides_are_refused() -> None:
    with pytest.raises(UsageError, match=r"shape \[1, 4, 6\] have no height and width"):
        weigh_latents((1, 4, 6), noise_mask(0), 0.0)


def halved(height: int, width: int) -> tuple[int, ...]:
    return (1, 4, height // 2, width // 2)


def quartered(height: int, width: int) -> tuple[int, ...]:
    return (1, 4, height // 4, width // 4)


def test_the_unit_of_a_variant_asks_for_what_its_latents_follow_from() -> None:
    unit = MaskUnit(FunctionSpec.of(halved))
    assert unit.inputs == {
        "loss_mask": True,
        "unmasked_weight": True,
        "height": True,
        "width": True,
    }
    assert unit.outputs == {"loss_weight": "tensor"}
    values = {
        "loss_mask": noise_mask(0, 4, 6),
        "unmasked_weight": 0.0,
        "height": 4,
        "width": 6,
    }
    made = unit.run(values, {})
    assert same(made, weigh_latents(SHAPE, noise_mask(0, 4, 6), 0.0))


def test_the_code_of_latent_shape_is_part_of_what_the_unit_is() -> None:
    one, other = (MaskUnit(FunctionSpec.of(shape)) for shape in (halved, quartered))
    assert one.identity == MaskUnit(FunctionSpec.of(halved)).identity
    assert one.identity != other.identity


# The variant


def test_without_masks_the_variant_stays_as_it_is() -> None:
    spec = build("base")
    assert with_masks(spec, SFT, Masks()) is spec


def test_the_mask_is_of_the_image_that_the_latents_are_encoded_from() -> None:
    spec = with_masks(build("base"), SFT, replace(BY_COLUMN, unmasked_weight=0.5))
    column = spec.inputs["loss_mask"]
    assert column == MaskColumn("mask", "image", mode="L", of="input_image")
    assert spec.inputs["unmasked_weight"] == Constant(0.5)
    assert [unit.name for unit in spec.units][-1] == "weigh_latents"
    alpha = with_masks(build("base"), SFT, Masks(None, True)).inputs["loss_mask"]
    assert alpha == MaskColumn(
        "image", "image", mode="RGBA", of="input_image", not_empty=True
    )


def test_one_dataset_is_read_with_other_masks_or_without_any() -> None:
    spec = with_masks(build("base"), SFT, BY_COLUMN)
    other = with_masks_of_dataset(spec, Masks("shape", False, 0.5))
    assert other.inputs["loss_mask"] == MaskColumn(
        "shape", "image", mode="L", of="input_image"
    )
    assert other.inputs["unmasked_weight"] == Constant(0.5)
    assert other.units == spec.units
    none = with_masks_of_dataset(spec, Masks())
    # Its rows have the inputs of rows whose cell is blank, and the units of these.
    assert none.inputs.keys() == spec.inputs.keys() - {MASK}
    assert none.units == build("base").units
    plain = build("base")
    assert with_masks_of_dataset(plain, BY_COLUMN) is plain


def test_masks_are_cached_and_enter_the_loss() -> None:
    spec = with_masks(build("base"), SFT, BY_COLUMN)
    inputs = frozenset(spec.inputs)
    plan = make_plan(spec, inputs, SFT, ("dit",))
    assert "loss_weight" in plan.cached_values
    assert "loss_weight" in plan.loss_inputs
    check_masks(plan)
    without = make_plan(spec, inputs - {MASK}, SFT, ("dit",))
    plain = make_plan(build("base"), inputs & set(build("base").inputs), SFT, ("dit",))
    assert without.cached_values == plain.cached_values
    assert without.loss_inputs == plain.loss_inputs


def no_weight(predict: Any, input_latents: Tensor) -> Tensor: ...


def test_a_loss_that_takes_no_weight_is_refused() -> None:
    with pytest.raises(UsageError, match="the loss of task mine takes no masks") as one:
        with_masks(build("base"), Task.of("mine", no_weight), BY_COLUMN)
    assert one.value.where == "--mask_column"
    assert "loss_weight: Tensor | None = None" in one.value.help_lines[0]


def filmed(**changes: Any) -> PipelineSpec:
    """The variant with a video, of which the latents are encoded, as their columns say."""
    base = PIPELINES["base"]
    column = Column("video", "video", multiple=8)
    return replace(base, inputs={**base.inputs, "input_image": column, **changes})


def test_the_alpha_channel_of_videos_is_refused() -> None:
    with pytest.raises(UsageError, match="alpha channels are not read"):
        with_masks(filmed(), SFT, Masks(None, True))
    column = with_masks(filmed(), SFT, BY_COLUMN).inputs["loss_mask"]
    assert isinstance(column, MaskColumn) and column.of == "input_image"


def test_a_mask_of_a_list_of_images_is_refused() -> None:
    base = PIPELINES["base"]
    several = {"input_image": Column("image", "images", multiple=8)}
    spec = replace(base, inputs={**base.inputs, **several})
    with pytest.raises(UsageError, match="from no image or video; a mask is of one"):
        with_masks(spec, SFT, BY_COLUMN)


def test_a_variant_whose_latents_have_no_known_size_is_refused() -> None:
    spec = with_masks(build("base"), SFT, BY_COLUMN)
    absent = frozenset({"prompt", "input_image", "loss_mask"})
    with pytest.raises(UsageError, match="size of the latents of tiny base is unk"):
        check_masks(make_plan(spec, absent, SFT, ("dit",)))


# Runs


@pytest.mark.parametrize("unmasked_weight", [0.0, 0.25])
def test_split_and_unsplit_runs_are_equal(here: Path, unmasked_weight: float) -> None:
    write_masks(here, noise_masks(blank=(2,)))
    flags: dict[str, Any] = {
        "mask_column": "mask",
        "unmasked_weight": unmasked_weight,
        "max_steps": 4,
        "batch_size": 2,
        "validation_split": 0.3,
    }
    train(here, output_path=here / "unsplit", **flags)
    for stage in ("data_process", "train"):
        train(
            here,
            output_path=here / "split",
            feature_cache=here / "cache",
            task=f"sft:{stage}",
            **flags,
        )
    assert log(here / "split") == log(here / "unsplit")
    tables = [here / one / "logs/validation.csv" for one in ("split", "unsplit")]
    assert tables[0].read_text() == tables[1].read_text()


def test_masks_change_losses_and_validation_losses(here: Path) -> None:
    write_masks(here, noise_masks())
    plain = losses(here, [0, 2])
    masked = losses(here, [0, 2], mask_column="mask")
    assert (plain != masked).all()


def test_a_mask_of_ones_and_no_mask_change_no_bit(here: Path) -> None:
    white = [mask_of(np.full((16, 24 if row % 2 else 16), 255)) for row in range(6)]
    write_masks(here, [*white[:5], None])
    for rows in ([0, 2], [1, 3], [5]):
        assert same(losses(here, rows), losses(here, rows, mask_column="mask"))


def test_a_batch_has_the_losses_of_its_rows(here: Path) -> None:
    write_masks(here, noise_masks())
    together = losses(here, [0, 2], mask_column="mask")
    apart = [losses(here, [row], mask_column="mask") for row in (0, 2)]
    torch.testing.assert_close(together, torch.cat(apart))


def test_an_alpha_channel_is_the_mask_of_its_image(here: Path) -> None:
    # Opaque images are the same over white as without an alpha channel.
    for row in range(6):
        with Image.open(here / f"data/{row}.png") as opened:
            Image.new("RGB", opened.size, "white").save(here / f"data/{row}.png")
    masks = noise_masks(blank=(5,))
    write_masks(here, masks)
    by_column = losses(here, [0, 2], mask_column="mask")
    write_alpha(here, masks)
    assert same(losses(here, [0, 2], alpha_mask=True), by_column)
    setup = resolve(config(here, alpha_mask=True))
    assert warnings_of_rows(setup)[0].endswith(
        "metadata.json: 1 of 6 rows have no mask: the loss counts all of them"
    )


def test_a_smaller_mask_of_the_same_ratio_is_scaled(here: Path) -> None:
    small = noise_masks()
    write_masks(here, small)
    expected = losses(here, [0], mask_column="mask")
    large = [
        one.resize((4 * one.width, 4 * one.height), Image.Resampling.NEAREST)
        for one in small
        if one is not None
    ]
    write_masks(here, large)
    torch.testing.assert_close(
        losses(here, [0], mask_column="mask"), expected, atol=0.02, rtol=0.02
    )


def stage_1(here: Path, **flags: Any) -> Counter[str]:
    """Fill the cache; return how often each unit ran."""
    ran: Counter[str] = Counter()

    def count(setup: Setup, pipeline: Pipeline, step: Step, *rest: Any) -> None:
        ran[step.unit.name] += 1
        compute_step(setup, pipeline, step, *rest)

    given = config(here, task="sft:data_process", feature_cache=here / "cache", **flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computing, "compute_step", count)
        data_process(resolve(given), ProcessGroup(Accelerator(cpu=True)))
    return ran


def test_masks_and_their_weight_compute_only_masks_anew(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_masks(here, noise_masks())
    assert stage_1(here) == {"encode_prompt": 6, "encode_image": 6}
    assert "loading text_encoder, tokenizer, vae" in capsys.readouterr().err
    assert stage_1(here, mask_column="mask") == {"weigh_latents": 6}
    half: dict[str, Any] = {"mask_column": "mask", "unmasked_weight": 0.5}
    assert stage_1(here, **half) == {"weigh_latents": 6}
    assert stage_1(here) == stage_1(here, mask_column="mask") == {}
    noise_mask(9).save(here / "data/mask-0.png")
    assert stage_1(here, mask_column="mask") == {"weigh_latents": 1}
    assert "loading" not in capsys.readouterr().err


def test_stage_2_says_which_masks_the_cache_was_filled_with(here: Path) -> None:
    write_masks(here, noise_masks())
    stage_1(here, mask_column="mask")
    second = {"task": "sft:train", "feature_cache": here / "cache", "max_steps": 1}
    with pytest.raises(CacheError) as caught:
        train(here, **second, mask_column="mask", unmasked_weight=0.5)
    assert caught.value.help_lines[0] == "--unmasked_weight: cache 0.0, this run 0.5"
    with pytest.raises(CacheError) as caught:
        train(here, **second)
    assert "unit weigh_latents: in the cache alone" in caught.value.help_lines[0]
    train(here, **second, mask_column="mask")


def test_rows_without_any_mask_are_refused(here: Path) -> None:
    write_masks(here, [None] * 6)
    with pytest.raises(UsageError, match="all values of column 'mask' are blank"):
        open_training_data(resolve(config(here, mask_column="mask")))
    with pytest.raises(UsageError, match="no image in column 'image' has an alpha"):
        open_training_data(resolve(config(here, alpha_mask=True)))


@pytest.mark.parametrize("stage", ["", ":data_process", ":train"])
def test_a_dry_run_with_masks_computes_what_memory_it_needs(
    here: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_masks(here, noise_masks())
    flags: dict[str, Any] = {"mask_column": "mask", "mixed_precision": "bf16"}
    if stage == ":train":
        stage_1(here, **flags)
    place = {"task": f"sft{stage}", "feature_cache": here / "cache"}
    train(here, **place, **flags, dry_run=True, device_memory="8GB")
    printed = capsys.readouterr().out
    assert ("activations" in printed) == (stage != ":data_process")
    assert "fits" in printed


def test_what_was_stored_of_masks_is_what_is_computed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_masks(here, noise_masks(blank=(1,)))
    stage_1(here, mask_column="mask", unmasked_weight=0.25)
    recompute(here / "cache", 6, 0, [], {})
    printed = capsys.readouterr().out
    # Latents, two values of the prompt, and five masks.
    assert "recomputed 6 of 6 samples; 23 of 23 values are equal" in printed


def test_a_black_mask_is_named_or_its_row_skipped_in_both_stages(here: Path) -> None:
    masks = noise_masks()
    masks[3] = mask_of(np.zeros((16, 24)))
    write_masks(here, masks)
    with pytest.raises(UsageError, match="masks out the whole image") as caught:
        stage_1(here, mask_column="mask")
    assert caught.value.where.endswith("metadata.json:4:mask")
    assert "'mask-3.png'" in caught.value.what
    flags: dict[str, Any] = {"mask_column": "mask", "feature_cache": here / "cache"}
    stage_1(here, mask_column="mask", on_bad_sample="skip")
    (line,) = (here / "cache/bad_samples.jsonl").read_text().splitlines()
    assert json.loads(line)["row"] == 4 and json.loads(line)["column"] == "mask"
    split = train(here, output_path=here / "a", task="sft:train", max_steps=7, **flags)
    flags = {"mask_column": "mask", "on_bad_sample": "skip", "max_steps": 7}
    assert log(split) == log(train(here, output_path=here / "b", **flags))
    # What is masked out counts a little, so nothing is bad.
    assert stage_1(here, mask_column="mask", unmasked_weight=0.5)["weigh_latents"] == 6


def test_a_student_is_compared_where_its_mask_is(here: Path) -> None:
    write_masks(here, noise_masks())
    table = here / "data/metadata.json"
    rows = json.loads(table.read_text())
    table.write_text(
        json.dumps([{**row, "seed": 1, "num_inference_steps": 2} for row in rows])
    )
    flags: dict[str, Any] = {"task": "direct_distill"}
    assert (
        losses(here, [0, 2], **flags)
        != losses(here, [0, 2], mask_column="mask", **flags)
    ).all()


def test_a_second_dataset_may_do_without_masks(here: Path, tmp_path: Path) -> None:
    write_masks(here, noise_masks())
    second = project(tmp_path / "second")
    write_masks(second, [None] * 6)
    out = train(
        here,
        mask_column="mask",
        validation_dataset_base_path=second / "data",
        max_steps=1,
    )
    assert (out / "logs/validation.csv").exists()
