"""For every variant of the families, what a step keeps for its backward pass is
counted within 15 % of what autograd saves, and weights within 2 % of what is allocated.
"""

from pathlib import Path

import pytest
import torch
from dstrain import TrainingModule
from dstrain.pipeline.planned_weights import planned_component
from dstrain.registry import load_family
from dstrain.runs import open_training_data
from dstrain.runs.loaded_module import load_module
from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.trained_sets import TrainedSet
from dstrain_planner.memory.activations import count_activations
from torch import nn

from tests.support import everyday
from tests.support.saved_tensors import saved, saved_in_blocks

EVERYDAY = {
    "flux": ("kontext",),
    "flux2": ("dev",),
    "qwen_image": ("edit-2509",),
    "sdxl": (),
    "wan": ("i2v", "i2v-a14b", "ti2v-5b"),
    "z_image": (),
}
"""Variants that together have every mechanism; the others are left to `make everything`."""
VARIANTS = everyday.cases(
    (
        (family, variant)
        for family in EVERYDAY
        for variant in load_family(family).variants
    ),
    lambda case: case[1] in EVERYDAY[case[0]],
)


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_an_estimate_is_what_is_then_kept(
    family: str, variant: str, tmp_path: Path
) -> None:
    model = load_family(family)
    project = FamilyUnderTest(model, variant, tmp_path)
    setup = project.setup(
        TrainedSet(lora=model.default_trainable),
        mixed_precision="bf16",
        use_gradient_checkpointing=False,
    )
    data = open_training_data(setup)
    plans = [setup.plan(inputs) for inputs in sorted(data.input_sets, key=sorted)]
    found = setup.find(plans)
    batch = [data.source.sample(*data.sample_ids[0])]
    empty, loaded = (
        load_module(setup, plans, found, TrainingModule, empty=empty)
        for empty in (True, False)
    )
    for name, network in loaded.pipeline.components.items():
        if isinstance(network, nn.Module):
            size = planned_component(
                name, empty.pipeline.components[name], name in loaded.trained.lora
            )
            tensors = [*network.parameters(), *network.buffers()]
            storages = {one.untyped_storage().data_ptr(): one for one in tensors}
            allocated = sum(one.nbytes for one in storages.values())
            estimated = size.frozen_bytes + size.trained_bytes
            assert estimated == pytest.approx(allocated, 0.02), name
    counted = count_activations(empty, batch)
    kept = counted.kept(checkpointing=False, offload=False) - counted.working
    assert kept == pytest.approx(sum(saved(loaded, batch).values()), 0.15)
    assert torch.is_grad_enabled()
    checkpointed = saved_in_blocks(loaded, batch)
    counted_parts = counted.outside, counted.inputs, counted.largest_block
    assert counted_parts == pytest.approx(checkpointed, 0.15)
