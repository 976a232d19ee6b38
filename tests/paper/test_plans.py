"""Every row that is not built yet is planned from signatures alone, and its plan is the
golden one.
"""

from typing import Any

import pytest
from dstrain.errors import UsageError
from dstrain.graph.spec import Wiring, check
from dstrain.training.losses import SFT

from .rows import PLANS, ROWS, WIRINGS, Row

DENOISERS = frozenset(
    {"dit", "controlnet", "blockwise_controlnet", "vace", "motion_controller"}
)
ENCODERS = frozenset(
    {
        "text_encoder",
        "text_encoder_1",
        "text_encoder_2",
        "vae",
        "image_encoder",
        "ipadapter_image_encoder",
    }
    | {"redux_image_encoder", "redux", "tokenizer", "tokenizer_1", "tokenizer_2"}
)


def every(rows: tuple[Row, ...]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


@every(ROWS)
def test_plan_is_the_golden_one(row: Row) -> None:
    path = PLANS / f"{row.name}.txt"
    assert path.is_file(), (
        f"{path} is missing: python -m tests.paper.write_plans, then read it"
    )
    assert row.text() == path.read_text()


def test_no_golden_plan_is_left_over() -> None:
    assert {path.stem for path in PLANS.glob("*.txt")} == {row.name for row in ROWS}


def test_every_wiring_has_a_golden_plan() -> None:
    assert {(wiring.family, wiring.variant) for wiring in WIRINGS} == {
        (row.family, row.variant) for row in ROWS
    }


@pytest.mark.parametrize(
    "wiring", WIRINGS, ids=lambda wiring: f"{wiring.family}-{wiring.variant}"
)
def test_wiring_passes_check(wiring: Wiring) -> None:
    check(wiring)


@every(ROWS)
def test_stage_1_loads_no_denoiser_and_nothing_that_is_trained(row: Row) -> None:
    stage_1 = set(row.plan().components["data_process"])
    assert not stage_1 & (DENOISERS | set(row.trains))


@every(ROWS)
def test_stage_2_loads_no_frozen_encoder(row: Row) -> None:
    plan = row.plan()
    live = {name for step in plan.live for name in step.unit.borrows}
    assert set(plan.components["train"]) & ENCODERS <= live


@every(ROWS)
def test_one_piece_loads_what_both_stages_load(row: Row) -> None:
    parts = row.plan().components
    assert set(parts[""]) == set(parts["data_process"]) | set(parts["train"])


@every(ROWS)
def test_both_stages_together_make_what_model_fn_and_loss_require(row: Row) -> None:
    plan, wiring = row.plan(), row.wiring
    made = {key for step in plan.live for key in step.makes.values()} | set(
        plan.crossing
    )
    assert set(wiring.model_fn.required) | set(row.task.loss.required) <= made


@every(ROWS)
def test_no_picture_or_frames_cross_unless_an_encoder_is_trained(row: Row) -> None:
    plan = row.plan()
    media = {
        key
        for key, kind in plan.crossing_kinds.items()
        if "picture" in kind or "frames" in kind
    }
    assert not media or set(row.trains) & ENCODERS


@every(tuple(row for row in ROWS if row.task is SFT))
def test_training_never_computes_the_negative_side(row: Row) -> None:
    plan = row.plan()
    assert not [
        key
        for step in (*plan.frozen, *plan.live)
        for key in step.reads.values()
        if key.startswith("negative")
    ]


@pytest.mark.parametrize(
    ("family", "variant", "absent"),
    [
        ("qwen_image", "in-context-control", "context_image"),
        (
            "qwen_image",
            "blockwise-controlnet-inpaint",
            "blockwise_controlnet_inpaint_mask",
        ),
        ("qwen_image", "layered-control", "context_image"),
        ("qwen_image", "eligen", "eligen_entity_masks"),
        ("flux", "controlnet-union", "controlnet_processor_id"),
        ("flux", "fill", "flux_fill_mask"),
        ("flux", "ip-adapter", "ipadapter_images"),
        ("wan", "speedcontrol", "motion_bucket_id"),
        ("wan", "flf2v-2.1", "end_image"),
        ("wan", "vace", "vace_video"),
    ],
)
def test_a_row_without_its_own_column_is_refused_by_name(
    family: str, variant: str, absent: str
) -> None:
    with pytest.raises(UsageError, match=absent):
        Row(family, variant, without=frozenset({absent})).plan()


def test_an_inference_only_row_is_refused_in_training() -> None:
    with pytest.raises(UsageError, match="inpaint_mask"):
        Row("qwen_image", "inpaint").plan()


def test_dotted_trainables_plan_as_their_component() -> None:
    whole = Row("flux", "controlnet-union", ("controlnet",)).plan()
    assert Row("flux", "controlnet-union", ("controlnet.models.0",)).plan() == whole


def test_variants_share_their_functions() -> None:
    """A variant adds a unit and repeats none: functions are fewer than three fifths of
    the units wired.
    """
    wired = [unit.function for wiring in WIRINGS for unit in wiring.units]
    assert len(set(wired)) < len(wired) * 0.6
