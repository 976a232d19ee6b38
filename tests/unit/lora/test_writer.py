"""What is written for a program reads back as the layers that were trained, exactly."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from dstrain import LoraConfig, UsageError
from dstrain.lora import add_layers, check_names, key_formats
from dstrain.lora.fusing import fuse, split_fused
from dstrain.lora.key_names import key_table
from dstrain.lora.layers import LoraLayer
from dstrain.lora.writer import layers_in, peft_exceptions
from dstrain.storage import CHECKSUM, read_tensors

from tests.support.lora_family import (
    COMPONENTS,
    MODEL,
    ORIGINAL,
    SHAPES,
    SPEC,
    adapter,
    in_names_of,
    network,
    ours,
    output,
    read,
    same,
    trained,
    written,
)  # fmt: skip


class Naming(NamedTuple):
    """program, a layer of the first block as it names it, and the ends of its keys."""

    program: str
    layer: str
    ends: tuple[str, ...]


NAMINGS = (
    Naming(
        "diffusers",
        "transformer.blocks.0.attn.to_out.0",
        ("lora_A.weight", "lora_B.weight"),
    ),
    Naming(
        "comfyui",
        "diffusion_model.double.0.proj",
        ("alpha", "lora_down.weight", "lora_up.weight"),
    ),
    Naming(
        "kohya",
        "lora_unet_double_0_proj",
        ("alpha", "lora_down.weight", "lora_up.weight"),
    ),
    Naming("diffsynth", "layers.0.o", ("lora_A.weight", "lora_B.weight")),
)


@pytest.mark.parametrize("naming", NAMINGS, ids=lambda naming: naming.program)
@pytest.mark.parametrize(("rank", "alpha"), [(4, 4.0), (4, 6.0), (2, 8.0), (3, 0.7)])
def test_a_file_in_any_naming_acts_as_what_was_trained(
    naming: Naming, rank: int, alpha: float, tmp_path: Path
) -> None:
    lora_config = LoraConfig("dit", SPEC.targets, rank, alpha)
    path, module = ours(tmp_path, lora_config)
    tensors = in_names_of(naming.program, tmp_path, lora_config)
    assert sorted(key for key in tensors if key.startswith(f"{naming.layer}.")) == [
        f"{naming.layer}.{end}" for end in naming.ends
    ]
    header = {
        "diffusers": adapter(r=rank, lora_alpha=rank),
        "diffsynth": {"scale": "in lora_B"},
    }.get(naming.program)
    again = read(written(tmp_path / "x.safetensors", tensors, header))
    plain = network()
    add_layers(plain, again.layers)
    assert torch.allclose(output(plain), output(module), atol=1e-5)
    assert not torch.allclose(output(plain), output(network()), atol=1e-2)
    assert same(again.layers, read(path).layers)


def test_fused_layers_have_three_times_the_rank_and_come_back_bit_for_bit(
    tmp_path: Path,
) -> None:
    layers = read(ours(tmp_path)[0]).layers
    rows = key_table(ORIGINAL, SHAPES)["double.0.qkv"]
    one = fuse(layers, rows)
    assert (one.rank, one.alpha, tuple(one.up.shape)) == (12, 12.0, (18, 12))
    assert same(
        split_fused(one, rows),
        {f"blocks.0.attn.to_{x}": layers[f"blocks.0.attn.to_{x}"] for x in "qkv"},
    )


@pytest.mark.parametrize(
    "targets", [("to_q",), ("to_k", "to_v"), ("0.attn.to_v", "1.attn.to_q")]
)
def test_parts_of_a_fused_layer_without_lora_are_zero_rows(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    lora_config = LoraConfig("dit", targets, 4, 6.0)
    path, _ = ours(tmp_path, lora_config)
    tensors = in_names_of("comfyui", tmp_path, lora_config)
    ranks = {len(tensors[key]) for key in tensors if key.endswith("down.weight")}
    assert ranks == {8 if targets == ("to_k", "to_v") else 4}
    again = read(written(tmp_path / "x.safetensors", tensors))
    assert same(again.layers, read(path).layers)


def test_parts_of_unlike_strength_are_fused_exactly() -> None:
    draw = torch.Generator().manual_seed(0)
    names = [f"blocks.0.attn.to_{x}" for x in "qkv"]
    layers = {
        name: LoraLayer(
            torch.randn(rank, 6, generator=draw),
            torch.randn(6, rank, generator=draw),
            alpha,
        )
        for name, rank, alpha in zip(names, (2, 2, 4), (2.0, 3.0, 1.0), strict=True)
    }
    one = fuse(layers, key_table(ORIGINAL, SHAPES)["double.0.qkv"])
    assert (one.rank, one.alpha) == (8, 8.0)
    wanted = torch.cat(
        [layer.alpha / layer.rank * layer.up @ layer.down for layer in layers.values()]
    )
    assert torch.allclose(one.alpha / one.rank * one.up @ one.down, wanted, atol=1e-6)


def test_the_file_says_all_that_is_needed_to_use_it(tmp_path: Path) -> None:
    lora_config = LoraConfig("dit", ("to_q", "to_out.0"), 4, 8.0)
    path, _ = ours(tmp_path, lora_config, step="12")
    tensors, header = read_tensors(path)
    assert json.loads(header.pop("lora_adapter_metadata")) == {
        "transformer.r": 4,
        "transformer.lora_alpha": 4,
        "transformer.target_modules": ["to_out.0", "to_q"],
    }
    header.pop(CHECKSUM)
    assert header == {
        "format": "pt",
        "family": "fused",
        "step": "12",
        "component": "dit",
        "rank": "4",
        "alpha": "8.0",
        "targets": "to_out.0,to_q",
        "scale": "in lora_B",
    }
    assert sorted(tensors) == sorted(
        f"transformer.blocks.{block}.attn.{name}.lora_{matrix}.weight"
        for block in "01"
        for name in lora_config.targets
        for matrix in "AB"
    )


def dora(*targets: str) -> LoraConfig:
    return LoraConfig("dit", targets, 4, 6.0, type="dora")


@pytest.mark.parametrize(
    ("targets", "program", "words"),
    [
        (("to_q", "to_v"), "comfyui", r"one layer for .*to_q, .*to_k, .*to_v, not all"),
        (("to_q",), "diffsynth", "diffsynth has no key names for dora"),
        (("to_q", "to_k", "to_v"), "lokr in comfyui", "no LoKr of it is one of each"),
        (("to_q",), "else", "else has no key names for LoRA on dit"),
    ],
)
def test_what_no_file_could_hold_is_refused_before_it_is_trained(
    targets: tuple[str, ...], program: str, words: str
) -> None:
    lora_config = dora(*targets)
    if program.startswith("lokr in "):
        program = program.removeprefix("lokr in ")
        lora_config = replace(lora_config, type="lokr")
    with pytest.raises(UsageError, match=words):
        check_names(trained(lora_config), lora_config, MODEL, program)


def test_dora_that_a_file_can_hold_is_not_refused() -> None:
    for lora_config, program in (
        (dora("to_q", "to_k", "to_v"), "comfyui"),
        (dora("to_q"), "diffusers"),
        (LoraConfig("dit", ("to_q",), 4, 6.0), "comfyui"),
        (LoraConfig("dit", ("to_q",), 1, 6.0, type="lokr"), "diffusers"),
        (LoraConfig("dit", ("to_out.0",), 1, 6.0, type="lokr"), "comfyui"),
    ):
        check_names(trained(lora_config), lora_config, MODEL, program)


def test_dora_is_exported_to_no_program_that_ignores_it(tmp_path: Path) -> None:
    path, _ = ours(tmp_path, dora("to_q", "to_k", "to_v"))
    lora = read(path)
    assert lora.type == "dora"
    for program, count in (("diffusers", 3), ("comfyui", 4), ("kohya", 4)):
        key_format = key_formats(COMPONENTS[0], MODEL)[program]
        tensors = layers_in(lora, key_format, SHAPES)
        layers = 6 if program == "diffusers" else 2
        assert len(tensors) == count * layers
    with pytest.raises(UsageError, match="diffsynth has no key names for dora"):
        layers_in(lora, key_formats(COMPONENTS[0], MODEL)["diffsynth"], SHAPES)


def test_a_rank_of_a_layer_whose_name_ends_another_is_that_of_it_alone() -> None:
    ranks = {"out": 2, "block.out": 4, "block.in": 2}
    assert peft_exceptions(ranks, 4) == {"^out": 2, "block.in": 2}
