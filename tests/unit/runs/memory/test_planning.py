"""Of the flags with which a run fits, the cheapest are found, for both of its stages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.runs.memory.activations import Activations
from dstrain.runs.memory.components import ComponentSize, Stored
from dstrain.runs.memory.estimate import CONTEXT
from dstrain.runs.memory.facts import Facts
from dstrain.runs.memory.planning import PlannedRun
from dstrain.runs.resolve import resolve

from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")

GIB = 2**30


def sized(name: str, gib: int) -> ComponentSize:
    """A component of linear layers of a GiB each in bf16."""
    weight = Stored("layer", (2**14, 2**15), GIB, True, True, False, -1)
    return ComponentSize(name, "bf16", (weight,) * gib)


def planned(
    folder: Path, text_encoder: int = 16, vae: int = 1, **flags: Any
) -> PlannedRun:
    """A run of the tiny family with encoders of so many GiB and a small denoiser."""
    setup = resolve(config(project(folder), device_memory="24GB", **flags))
    sizes = {"dit": sized("dit", 2), "text_encoder": sized("text_encoder", text_encoder),
             "vae": sized("vae", vae)}  # fmt: skip
    counted = Activations(0, 0, 0, 0, 0, encoding=GIB, sample=1)
    plans = [setup.plan(setup.all_inputs())]
    return PlannedRun(setup, plans, Facts(sizes, (), counted, "a sample"))


def needed(gib: float) -> int:
    """The size of a device on which so many GiB fit."""
    return int(gib * GIB * 1.05) + CONTEXT + 1


@pytest.mark.parametrize(
    ("gib", "changes"),
    [
        (17, {"offload_models": "text_encoder,vae"}),
        (11.5, {"quant_options": "text_encoder:int8_block"}),
        (8, {"quant_options": "text_encoder:bitsandbytes_nf4"}),
    ],
)
def test_stage_1_gets_the_flags_that_cost_least(
    tmp_path: Path, gib: float, changes: dict[str, Any]
) -> None:
    run = planned(tmp_path, task="sft:data_process", feature_cache=tmp_path / "cache")
    way = run.cheapest(needed(gib))
    assert way is not None
    assert way.changes == changes
    assert run.estimate(way.config, "data_process").fits(needed(gib))


def test_both_stages_of_a_run_that_is_split_fit(tmp_path: Path) -> None:
    run = planned(tmp_path)
    way = run.cheapest(needed(11.5))
    assert way is not None and way.is_split
    assert way.stage_1["quant_options"] == "text_encoder:int8_block"
    assert way.changes["quant_options"] == "text_encoder:int8_block"
    assert all(one.fits(needed(11.5)) for one in run.estimate_stages(way))
    assert run.cheapest(needed(1)) is None


@pytest.mark.parametrize(
    ("gib", "changes"),
    [
        (17, {"offload_models": "text_encoder,vae"}),
        (11.5, {"quant_options": "text_encoder:int8_block"}),
    ],
)
def test_a_command_of_both_stages_gets_what_either_needs_and_no_more(
    tmp_path: Path, gib: float, changes: dict[str, Any]
) -> None:
    run = planned(tmp_path, feature_cache=tmp_path / "cache")
    way = run.cheapest(needed(gib))
    assert way is not None and not way.is_split
    assert way.changes == changes
    assert all(one.fits(needed(gib)) for one in run.estimate_stages(way))


def test_a_command_of_both_stages_that_resumes_keeps_its_cached_values(
    tmp_path: Path,
) -> None:
    (tmp_path / "out/states/step-1").mkdir(parents=True)
    (tmp_path / "out/states/step-1/record.json").write_text("{}")
    run = planned(tmp_path, feature_cache=tmp_path / "cache", resume="auto")
    way = run.cheapest(needed(17))
    assert way is not None and way.changes == {"offload_models": "text_encoder,vae"}
    assert run.cheapest(needed(11.5)) is None


def test_a_stage_of_both_has_its_own_components(tmp_path: Path) -> None:
    run = planned(tmp_path, feature_cache=tmp_path / "cache")
    parts = [run.of_stage(stage) for stage in ("data_process", "train")]
    assert [one.setup.stage for one in parts] == ["data_process", "train"]
    assert [set(one.facts.components) for one in parts] == [
        {"text_encoder", "vae"},
        {"dit"},
    ]


def test_tiles_are_counted_only_where_weights_leave_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned(
        tmp_path,
        task="sft:data_process",
        feature_cache=tmp_path / "cache",
        offload_models="vae",
    )
    counted = []

    def in_tiles(*given: object) -> int:
        counted.append(given)
        return GIB // 4

    monkeypatch.setattr("dstrain.runs.memory.planning.encoding_in_tiles", in_tiles)
    monkeypatch.setattr("dstrain.runs.memory.planning.can_tile", lambda *given: True)
    monkeypatch.setattr("dstrain.runs.resolve.check_tiling", lambda *given: None)
    assert run.cheapest(needed(11.5)) is not None
    assert not counted
    way = run.cheapest(needed(17.5))
    assert way is not None
    assert way.changes == {"tiled": True}
    assert len(counted) == 1


def test_flags_that_a_run_cannot_have_are_no_advice(tmp_path: Path) -> None:
    run = planned(tmp_path, task="sft:data_process", feature_cache=tmp_path / "cache")
    odd = replace(run.setup.config, offload_models="tokenizer")
    with pytest.raises(UsageError):
        run.estimate(odd, "data_process")
    assert not run._fits(odd, "data_process", 2**60)
