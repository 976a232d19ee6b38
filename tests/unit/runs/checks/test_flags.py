"""Options that a run cannot have are refused before anything is loaded."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dstrain import LoraConfig, Trainables, UsageError
from dstrain.plugin import Option
from dstrain.runs.checks.flags import check_saved_names
from dstrain.runs.resolve import resolve

from tests.support.runs import config, project

FULL, OTHER = (
    Trainables(("dit2",)),
    Trainables(lora=(LoraConfig("dit2", ("to_q",), 2, 2.0),)),
)
SAVES = Option("as_others", "Save in the names of another program.", saves="kohya")


def setup_of(trained: Trainables) -> Any:
    return SimpleNamespace(
        family=SimpleNamespace(default_trainable="dit", load=lambda part: ()),
        trainables=trained,
        saving=SAVES,
        config=SimpleNamespace(lora_format=None),
    )


@pytest.mark.parametrize("trained", [FULL, OTHER])
def test_names_of_another_program_are_refused_without_a_lora_of_the_default_component(
    trained: Trainables,
) -> None:
    with pytest.raises(
        UsageError, match="--as_others: has no effect: no LoRA on dit is trained"
    ):
        check_saved_names(setup_of(trained))
    check_saved_names(
        setup_of(Trainables(lora=(LoraConfig("dit", ("to_q",), 2, 2.0),)))
    )


def test_a_resolution_without_buckets_is_refused_before_rows_are_read(
    tiny: object, tmp_path: Path
) -> None:
    project(tmp_path)
    (tmp_path / "data/metadata.json").write_text('[{"image": "gone.png"}]')
    with pytest.raises(UsageError, match=r"--resolution: 2 is too small: at least \d"):
        resolve(config(tmp_path, resolution="2"))


def test_lokr_on_a_component_that_is_quantized_is_refused_before_it_is_loaded(
    tiny: object, tmp_path: Path
) -> None:
    given = config(project(tmp_path), lora_rank=2, lora_type="lokr")
    resolve(given)
    what = (
        "--lora_type: lokr needs weights as they are loaded; --fp8_models quantizes dit"
    )
    with pytest.raises(UsageError, match=what):
        resolve(replace(given, fp8_models="dit"))
    resolve(replace(given, quant_options="dit:int8_block/to_q"))
