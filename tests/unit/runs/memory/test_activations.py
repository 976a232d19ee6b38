"""What a step keeps for its backward pass is counted as autograd saves it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Sample, SampleKey, TrainingModule, UsageError
from dstrain.models.execution import checkpoint_through
from dstrain.runs import open_training_data
from dstrain.runs.build import load_module
from dstrain.runs.memory.activations import count_activations
from dstrain.runs.resolve import resolve
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from tests.support.runs import config, project

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


def saved(module: TrainingModule, batch: list[Sample]) -> dict[int, int]:
    """What autograd really saves, weights aside: where it lies, and its bytes."""
    weights = {
        tensor.untyped_storage().data_ptr()
        for network in module.pipeline.components.values()
        if isinstance(network, nn.Module)
        for tensor in (*network.parameters(), *network.buffers())
    }
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage
        return tensor

    keys = [SampleKey(0, 0, 0, row) for row in range(len(batch))]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = module.losses(batch, keys)
    del losses
    return {place: storage.nbytes() for place, storage in found.items()}


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


def saved_in_blocks(
    module: TrainingModule, batch: list[Sample]
) -> tuple[int, int, int]:
    """The bytes that autograd really saves outside of the networks' blocks, those of the
    other inputs of blocks, and the most that one block saves by itself.
    """
    inputs: dict[int, Tensor] = {}
    blocks: list[int] = []

    def block(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        for one in tree_leaves((args, named)):
            if isinstance(one, Tensor):
                inputs[one.untyped_storage().data_ptr()] = one
        inside: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            inside[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            result = function(*args, **named)
        # An adapter acts around the block that is called last.
        owner: Any = function.args[-1] if isinstance(function, partial) else function
        own = {one.untyped_storage().data_ptr() for one in owner.parameters()}
        blocks.append(sum(size for key, size in inside.items() if key not in own))
        return result

    for name, network in module.networks.items():
        with suppress(UsageError):
            checkpoint_through(name, network, block)
    outside = saved(module, batch)
    others = [one for place, one in inputs.items() if place not in outside]
    sizes = [one.untyped_storage().nbytes() for one in others]
    return sum(outside.values()), sum(sizes), max(blocks)


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
