"""Layers of a file are grouped by the components that their names allow."""

from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from dstrain.lora import groups_in
from dstrain.registry import load_family

from tests.support.lora_family import MODEL, as_trained

PATH = Path("x.safetensors")
DITS = ("dit", "dit2")
NAMES = MappingProxyType(
    {
        "transformer.": ("blocks.0.attn1.to_q", "vace_blocks.0.attn1.to_q"),
        "diffusion_model.": ("blocks.0.self_attn.q", "vace_blocks.0.self_attn.q"),
        "lora_unet_": ("blocks_0_self_attn_q", "vace_blocks_0_self_attn_q"),
    }
)


@pytest.mark.parametrize("prefix", NAMES)
def test_names_that_a_networks_files_leave_to_another_are_not_its_own(
    prefix: str,
) -> None:
    family = load_family("wan")
    tensors = {
        f"{prefix}{name}.lora_{matrix}.weight": torch.ones(2, 2)
        for name in NAMES[prefix]
        for matrix in "AB"
    }
    dit, vace = groups_in(PATH, tensors, family)
    assert (dit.prefix.components, vace.prefix.components) == (DITS, ("vace", "vace2"))
    assert (dit.names, vace.names) == ([NAMES[prefix][0]], [NAMES[prefix][1]])


def test_names_that_say_less_are_part_of_the_group_that_says_more() -> None:
    """The layers of a denoiser are one group, though VACE's files do not name all of them
    as another's.
    """
    names = ["blocks.0.cross_attn.k", "img_emb.proj.1", "vace_blocks.0.self_attn.q"]
    tensors = {
        f"diffusion_model.{name}.lora_{matrix}.weight": torch.ones(2, 2)
        for name in names
        for matrix in "AB"
    }
    dit, vace = groups_in(PATH, tensors, load_family("wan"))
    assert (dit.prefix.components, dit.names) == (DITS, names[:2])
    assert vace.names == names[2:]


def test_names_that_several_components_may_have_are_one_group() -> None:
    (group,) = groups_in(PATH, as_trained(), MODEL)
    assert group.prefix.text == "transformer."
    assert set(DITS) <= set(group.prefix.components)
    assert not group.peft
