"""What a step keeps for its backward pass is counted as autograd saves it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import Sample, TrainingModule
from dstrain.runs import open_training_data
from dstrain.runs.loaded_module import load_module
from dstrain.runs.resolve import resolve
from dstrain_planner.memory.activations import count_activations

from tests.support.runs import config, project
from tests.support.saved_tensors import saved, saved_in_blocks

pytestmark = pytest.mark.usefixtures("tiny")


def counted_and_module(
    folder: Path, samples: int = 1, **flags: Any
) -> tuple[Any, TrainingModule, list[Sample]]:
    """The estimate of a run of the tiny family, its loaded module and its samples."""
    setup = resolve(config(project(folder), **flags))
    data = open_training_data(setup)
    plans = [setup.plan(inputs) for inputs in data.input_sets]
    found = setup.find(plans)
    batch = [data.source.sample(0)] * samples
    empty = load_module(setup, plans, found, TrainingModule, empty=True)
    counted = count_activations(empty, batch)
    return counted, load_module(setup, plans, found, TrainingModule), batch


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"samples": 3},
        {"mixed_precision": "bf16"},
        {"trainable_models": "dit"},
        {"trainable_models": "dit", "mixed_precision": "bf16"},
        {"trainable_models": "text_encoder"},
    ],
    ids=str,
)
def test_it_is_what_autograd_saves(tmp_path: Path, flags: dict[str, Any]) -> None:
    counted, module, batch = counted_and_module(tmp_path, **flags)
    wanted = sum(saved(module, batch).values())
    assert counted.kept(False, False) - counted.working == pytest.approx(wanted, 0.15)


def test_with_checkpointing_it_is_inputs_of_blocks_and_one_block(
    tmp_path: Path,
) -> None:
    counted, module, batch = counted_and_module(tmp_path, trainable_models="dit")
    outside, inputs, block = saved_in_blocks(module, batch)
    assert counted.outside == pytest.approx(outside, 0.15)
    assert counted.largest_block == block
    offloaded = counted.kept(True, True) - counted.working
    assert offloaded == pytest.approx(outside + block, 0.15)
    kept = counted.kept(True, False) - counted.working
    assert kept == offloaded + inputs


def test_copies_of_trained_weights_count_while_blocks_are_recomputed(
    tmp_path: Path,
) -> None:
    found, _, _ = counted_and_module(tmp_path)
    sizes = {"outside": 1, "inputs": 20, "blocks": 4000, "largest_block": 300}
    counted = replace(found, working=50_000, **sizes)
    assert counted.kept(False, False, 999) == 54_001
    assert counted.kept(True, False, 0) == 50_321
    assert counted.kept(True, False, 999) == 51_020
    assert counted.kept(False, True, 999) == 51_000
