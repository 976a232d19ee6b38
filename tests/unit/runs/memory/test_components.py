"""Bytes of weights are those that loading allocates."""

from pathlib import Path
from typing import Any

import pytest
from dstrain import TrainingModule
from dstrain.models import METHODS
from dstrain.models.execution import AS_LOADED
from dstrain.runs import open_training_data
from dstrain.runs.build import load_module
from dstrain.runs.memory.components import as_kept, component_size
from dstrain.runs.resolve import resolve
from torch import nn

from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"mixed_precision": "bf16"},
        {"trainable_models": "dit", "mixed_precision": "bf16"},
        {"trainable_models": "dit.blocks", "mixed_precision": "bf16"},
        {"trainable_models": "text_encoder", "lora_base_model": "dit"},
        {"quant_options": "dit:int8_block;text_encoder:fp8"},
        {"quant_options": "dit:fp8@to_q", "mixed_precision": "bf16"},
        *({"quant_options": f"dit:{one};text_encoder:{one}"} for one in METHODS),
    ],
    ids=str,
)
def test_they_are_what_is_then_allocated(tmp_path: Path, flags: dict[str, Any]) -> None:
    setup = resolve(config(project(tmp_path), **flags))
    plans = [setup.plan(inputs) for inputs in open_training_data(setup).input_sets]
    found = setup.find(plans)
    empty, loaded = (
        load_module(setup, plans, found, TrainingModule, empty=empty)
        for empty in (True, False)
    )
    for name, network in loaded.pipeline.components.items():
        if not isinstance(network, nn.Module):
            continue
        size = component_size(
            name,
            empty.pipeline.components[name],
            name in loaded.trained.lora,
        )
        tensors = [*network.parameters(), *network.buffers()]
        allocated = sum(one.untyped_storage().nbytes() for one in tensors)
        place = as_kept(size, setup.kept.get(name, AS_LOADED))
        assert place.device + size.trained_bytes == pytest.approx(allocated, 0.02)
        trained = [one for one in network.parameters() if one.requires_grad]
        assert size.trained_bytes == sum(one.nbytes for one in trained)
        assert size.trained == sum(one.numel() for one in trained)


def test_each_weight_knows_its_layer_and_block() -> None:
    network = nn.Sequential(
        nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    ).requires_grad_(False)
    size = component_size("dit", network.bfloat16(), has_lora=False)
    assert [(one.layer, one.block, one.is_storable) for one in size.stored] == [
        ("0", -1, True),
        ("0", -1, False),
        ("1.0", 0, True),
        ("1.0", 0, False),
        ("1.1", 1, True),
        ("1.1", 1, False),
    ]
    assert (size.parameters, size.frozen_bytes, size.dtype) == (60, 120, "bf16")
