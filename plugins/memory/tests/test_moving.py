"""Runs whose blocks are swapped, or whose encoders are in RAM, compute what others do, bit
for bit, and what cannot be swapped is refused by its option.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Diverged, StateError, UsageError, run
from dstrain.runs.loop import steps

from tests.support.family import weights_of
from tests.support.poisoned_memory import poisoned_memory
from tests.support.runs import config, outcome, same, train, training_run

pytestmark = pytest.mark.usefixtures("tiny")
ONE = {"blocks_to_swap": 1}
ALL = {"enable_model_cpu_offload": True}
WAYS: dict[str, dict[str, Any]] = {
    "one": ONE,
    "every block by number": {"blocks_to_swap": 2},
    "all": ALL,
}
SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "save_steps": 1,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    # No loss reaches `text` of the last block: its layers are saved as they are.
    "lora_target_modules": "to_q,to_out,proj_out,text",
}


def pictures(output: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(output.glob("previews/*.png"))]


@pytest.fixture(scope="module")
def without(here: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("without") / "out"
    return outcome(train(here, output_path=output, **SETTINGS))


def test_a_run_may_resume_with_other_blocks_swapped(
    here: Path, tmp_path: Path, without: dict[str, Any]
) -> None:
    output = tmp_path / "out"
    train(here, output_path=output, **{**SETTINGS, "max_steps": 1}, blocks_to_swap=2)
    train(here, output_path=output, **SETTINGS, resume="auto", blocks_to_swap=1)
    assert same(outcome(output), without)


def test_previews_are_those_of_a_run_without_swap(here: Path, tmp_path: Path) -> None:
    plain, swapped = (
        pictures(
            train(here, output_path=place, **SETTINGS, **way, preview_prompt=("a",))
        )
        for place, way in ((tmp_path / "plain", {}), (tmp_path / "all", WAYS["all"]))
    )
    assert plain == swapped
    assert len(plain) == 3


def test_swapping_turns_checkpointing_on_and_says_so_once(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = training_run(config(here, blocks_to_swap=1))
    dit: Any = ready.module.pipeline.components["dit"]
    assert dit.checkpoint is not None
    assert capsys.readouterr().err.count("--blocks_to_swap") == 1
    for flag in ("use_gradient_checkpointing", "use_gradient_checkpointing_offload"):
        training_run(config(here, blocks_to_swap=1, **{flag: True}))
        assert "--blocks_to_swap" not in capsys.readouterr().err


FULL = {"trainable_models": "dit.proj_in"}
ENCODER = {"lora_base_model": "text_encoder", "lora_target_modules": "layer"}


@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize(
    ("flags", "option", "named"),
    [
        ({"blocks_to_swap": 3}, "--blocks_to_swap", "--blocks_to_swap 2"),
        ({"blocks_to_swap": 0}, "--blocks_to_swap", "0"),
        ({**ONE, **FULL}, "--blocks_to_swap", "--trainable_models"),
        ({**ALL, **FULL}, "--enable_model_cpu_offload", "--trainable_models"),
        ({**ONE, **ENCODER}, "--use_gradient_checkpointing", "TextEncoder"),
        ({**ONE, **ALL}, "--blocks_to_swap", "--enable_model_cpu_offload"),
        ({"offload_models": "text_encodr"}, "--offload_models", "'text_encoder'"),
        ({"offload_models": "dit"}, "--offload_models", "--blocks_to_swap"),
        ({"offload_models": "tokenizer"}, "--offload_models", "tokenizer"),
    ],
)
def test_what_cannot_be_swapped_or_offloaded_is_refused(
    flags: dict[str, Any],
    option: str,
    named: str,
    is_dry: bool,
    here: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        run(config(here, output_path=tmp_path / "out", **flags, dry_run=is_dry))
    assert caught.value.where == option


def test_damaged_weights_of_swapped_blocks_are_found(here: Path) -> None:
    """Absent weights have no numbers, and are not damaged."""
    ready = training_run(config(here, blocks_to_swap=2))
    ready.module.trained_parameters[0].data.fill_(torch.inf)
    with pytest.raises(StateError, match="lora"):
        next(steps(ready))
    ready = training_run(config(here, blocks_to_swap=2, learning_rate=1e30))
    with pytest.raises(Diverged):
        list(steps(ready))


@pytest.mark.parametrize("names", ["text_encoder", "text_encoder, vae"])
@pytest.mark.parametrize("stages", [("sft",), ("sft:data_process", "sft:train")])
def test_a_run_with_offloaded_encoders_leaves_what_others_do_bit_for_bit(
    stages: tuple[str, ...], names: str, here: Path, tmp_path: Path
) -> None:
    outcomes = []
    for number, offload in enumerate((None, names)):
        given: dict[str, Any] = {
            "output_path": tmp_path / str(number),
            "offload_models": offload,
            "preview_prompt": ("a dog",),
        }
        if len(stages) > 1:
            given["feature_cache"] = tmp_path / f"cache {number}"
        with poisoned_memory() as seen:
            for stage in stages:
                output = train(here, task=stage, **{**SETTINGS, **given})
            assert (seen.loads > 0, seen.now) == (number == 1, 0)
        outcomes.append([outcome(output), pictures(output)])
    assert same(*outcomes)


def test_a_cache_that_is_full_has_all_that_offloaded_components_would_compute(
    here: Path, tmp_path: Path
) -> None:
    """Stage 1 may name the denoiser, too, which it does not load."""
    stage_1 = {"task": "sft:data_process", "feature_cache": tmp_path / "cache"}
    train(here, **stage_1)
    with poisoned_memory() as seen:
        for names in ("text_encoder,vae", "dit"):
            train(here, offload_models=names, **stage_1)
    assert seen.loads == 0


@pytest.mark.parametrize("stage", ["sft", "sft:data_process"])
def test_offloaded_components_are_named_by_their_files_too(
    stage: str, here: Path, tmp_path: Path
) -> None:
    (encoder,) = weights_of(here / "model")["text_encoder"]
    loads = []
    for name in ("text_encoder", encoder):
        given = {"task": stage, "output_path": tmp_path / str(len(loads))}
        with poisoned_memory() as seen:
            train(here, offload_models=name, max_steps=1, **given)
        loads.append(seen.loads)
    assert loads[0] == loads[1] > 0
