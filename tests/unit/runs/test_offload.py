"""Runs whose blocks are swapped compute what others do, bit for bit, and what cannot be
swapped is refused in words.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Diverged, StateError, UsageError, run
from dstrain.distributed import Sharding
from dstrain.models.execution import ALL_BLOCKS
from dstrain.runs.loop import optimizer_steps, out_of_memory, steps
from dstrain.runs.offload import swap_advice
from dstrain.runs.resolve import resolve

from tests.support.family import weights_of
from tests.support.poisoned_memory import poisoned_memory
from tests.support.runs import config, outcome, project, same, train, training_run

pytestmark = pytest.mark.usefixtures("tiny")
WAYS: dict[str, dict[str, Any]] = {
    "one": {"blocks_to_swap": 1},
    "every block by number": {"blocks_to_swap": 2},
    "all": {"enable_model_cpu_offload": True},
}
SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "save_steps": 1,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    # No loss reaches `text` of the last block: its layers are saved as they are.
    "lora_target_modules": "to_q,to_out,proj_out,text",
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def without(here: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("without") / "out"
    return outcome(train(here, output_path=output, **SETTINGS))


@pytest.mark.parametrize("way", WAYS)
def test_a_run_with_swapped_blocks_leaves_what_others_do_bit_for_bit(
    way: str, here: Path, tmp_path: Path, without: dict[str, Any]
) -> None:
    with poisoned_memory() as seen:
        output = train(here, output_path=tmp_path / "out", **WAYS[way], **SETTINGS)
    assert same(outcome(output), without)
    swapped = 1 if way == "one" else 2
    # Two copies in each micro-batch, of which a step has two.
    assert (seen.loads, seen.now) == (3 * 2 * 2 * swapped, 0)
    assert seen.most <= 2


def test_a_run_may_resume_with_other_blocks_swapped(
    here: Path, tmp_path: Path, without: dict[str, Any]
) -> None:
    output = tmp_path / "out"
    train(here, output_path=output, **{**SETTINGS, "max_steps": 1}, blocks_to_swap=2)
    train(here, output_path=output, **SETTINGS, resume="auto", blocks_to_swap=1)
    assert same(outcome(output), without)


def test_previews_are_those_of_a_run_without_swap(here: Path, tmp_path: Path) -> None:
    pictures = []
    for way in ({}, WAYS["all"]):
        output = tmp_path / str(len(pictures))
        train(here, output_path=output, **SETTINGS, **way, preview_prompt=("a dog",))
        pictures.append(
            [path.read_bytes() for path in sorted(output.glob("previews/*.png"))]
        )
    assert pictures[0] == pictures[1]
    assert len(pictures[0]) == 4


def test_checkpointing_is_turned_on_and_said_once(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = "--blocks_to_swap turns gradient checkpointing on"
    with caplog.at_level(logging.INFO):
        ready = training_run(config(here, blocks_to_swap=1))
    assert ready.module.pipeline.components["dit"].checkpoint is not None
    assert [one.message for one in caplog.records].count(said) == 1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        training_run(config(here, blocks_to_swap=1, use_gradient_checkpointing=True))
    assert said not in caplog.text


def test_how_blocks_are_kept_is_said_and_changes_no_key(here: Path) -> None:
    setup = resolve(config(here, blocks_to_swap=1))
    assert setup.kept["dit"].swapped_blocks == 1
    assert setup.kept["dit"].describe() == "1 block swapped"
    every = resolve(config(here, enable_model_cpu_offload=True))
    assert every.kept["dit"].swapped_blocks == ALL_BLOCKS
    assert every.kept["dit"].describe() == "all blocks swapped"
    assert every.kept["dit"].identity == []


@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"blocks_to_swap": 3},
            "--blocks_to_swap: 3 is more than the 2 blocks of dit\n  --blocks_to_swap 2 swaps all of them",
        ),
        (
            {"blocks_to_swap": 1, "trainable_models": "dit"},
            "--blocks_to_swap: is for weights that do not change, but --trainable_models trains all of dit",
        ),
        (
            {"enable_model_cpu_offload": True, "trainable_models": "dit.proj_in"},
            "--enable_model_cpu_offload: is for weights that do not change",
        ),
        (
            {
                "blocks_to_swap": 1,
                "lora_base_model": "text_encoder",
                "lora_target_modules": "layer",
            },
            "--use_gradient_checkpointing: text_encoder (TextEncoder) does not support it",
        ),
        (
            {"blocks_to_swap": 1, "enable_model_cpu_offload": True},
            "--blocks_to_swap: has no effect with --enable_model_cpu_offload, which swaps all blocks",
        ),
        ({"blocks_to_swap": 0}, "--blocks_to_swap: expected 1 or more, got 0"),
    ],
)
def test_what_cannot_be_swapped_is_refused(
    flags: dict[str, Any], words: str, is_dry: bool, here: Path, tmp_path: Path
) -> None:
    asked = config(here, output_path=tmp_path / "out", **flags, dry_run=is_dry)
    with pytest.raises(UsageError) as caught:
        run(asked)
    assert words in str(caught.value)


def test_where_weights_are_divided_no_swap_is_advised(here: Path) -> None:
    setup = resolve(config(here))
    assert "--blocks_to_swap" in " ".join(swap_advice(setup))
    for sharding in (Sharding(), Sharding(reshard_after_forward=False)):
        advice = swap_advice(replace(setup, sharding=sharding))
        assert advice == list(sharding.advice())
        assert "swap" not in " ".join(advice)


def test_out_of_memory_names_the_flag(here: Path) -> None:
    advice = []
    for way in ({}, *WAYS.values()):
        ready = training_run(config(here, **way))
        _, batches = next(optimizer_steps(ready))
        advice.append(str(out_of_memory(ready, batches)))
    assert "give --blocks_to_swap N" in advice[0]
    assert "raise --blocks_to_swap; --enable_model_cpu_offload" in advice[1]
    assert "--blocks_to_swap" not in advice[3]


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
        pictures = sorted(output.glob("previews/*.png"))
        outcomes.append([outcome(output), [one.read_bytes() for one in pictures]])
    assert same(*outcomes)


def test_offloaded_components_change_no_key(here: Path, tmp_path: Path) -> None:
    """Stage 1 with them finds everything in the cache."""
    cache = tmp_path / "cache"
    train(here, task="sft:data_process", feature_cache=cache)
    with poisoned_memory() as seen:
        offload = "text_encoder,vae"
        train(
            here, task="sft:data_process", feature_cache=cache, offload_models=offload
        )
        train(here, task="sft:train", feature_cache=cache, output_path=tmp_path / "out")
    assert seen.loads == 0


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            "text_encodr",
            "'text_encodr' is no component of tiny base and no entry of the model flags; did you mean 'text_encoder'?",
        ),
        (
            "dit",
            "has no effect: dit is trained; its blocks can be swapped with --blocks",
        ),
        ("tokenizer", "has no effect: tokenizer has no weights"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(
    names: str, words: str, here: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        run(config(here, output_path=tmp_path / "out", offload_models=names))
    assert words in str(caught.value)


def test_offloaded_components_are_named_by_their_files_too(here: Path) -> None:
    paths = [path for paths in weights_of(here / "model").values() for path in paths]
    (encoder,) = [path for path in paths if "text_encoder" in str(path)]
    for stage in ("sft", "sft:data_process"):
        given = config(here, task=stage, offload_models=str(encoder))
        kept = resolve(given).kept
        assert [name for name, one in kept.items() if one.offloaded] == ["text_encoder"]


def test_stage_1_may_name_the_denoiser_which_it_does_not_load(here: Path) -> None:
    given = config(here, task="sft:data_process", offload_models="dit")
    assert resolve(given).kept["dit"].offloaded
