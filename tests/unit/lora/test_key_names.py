"""Names of layers in files follow from the checkpoint formats, and are looked up."""

from dataclasses import replace

import pytest
import torch
from dstrain import LoraConfig
from dstrain.lora import base_shapes, inject, key_formats, matching_names, unused_layers
from dstrain.lora.key_names import (
    Rows,
    checkpoint_formats,
    key_table,
    layers_of,
    prefixes,
    with_underscores,
)
from dstrain.models import NATIVE
from dstrain.plugin import LoraKeyFormat

from tests.support.lora_family import COMPONENTS, MODEL, ORIGINAL, SHAPES, network

DIT, _, ENCODER = COMPONENTS


def test_shapes_are_those_of_the_network_without_lora() -> None:
    module = network()
    before = base_shapes(module)
    inject(module, LoraConfig("dit", ("to_q", "to_out.0"), 2, 2.0), {})
    assert base_shapes(module) == before
    assert before["blocks.0.attn.to_q.weight"] == (6, 6)


def test_layers_are_weights_of_two_axes_or_more() -> None:
    shapes = {"a.weight": (2, 3), "a.bias": (2,), "norm.weight": (2,), "b": (2, 2)}
    assert layers_of(shapes) == {"a": (2, 3)}
    assert "blocks.0.attn.to_q" in layers_of(SHAPES)


def test_a_component_has_the_names_it_declares_and_defaults_for_the_others() -> None:
    found = key_formats(DIT, MODEL)
    assert set(found) == {"diffusers", "comfyui", "kohya", "diffsynth"}
    assert found["diffusers"].prefixes == ("transformer.",)
    assert found["comfyui"].checkpoint_format is ORIGINAL
    assert found["kohya"].underscored
    assert found["diffsynth"] is DIT.lora[0]
    assert set(key_formats(ENCODER, MODEL)) == {"diffusers", "kohya", "diffsynth"}


def test_the_longest_beginning_comes_first_and_names_every_component_it_stands_for() -> (
    None
):
    found = prefixes(MODEL)
    lengths = [len(prefix.text) for prefix in found]
    assert lengths == sorted(lengths, reverse=True)
    assert (found[-1].text, found[-1].components) == (
        "",
        ("dit", "dit2", "text_encoder"),
    )
    by_text = {prefix.text: prefix for prefix in found}
    assert by_text["transformer."].components == ("dit", "dit2")
    assert by_text["lora_te1_"].components == ("text_encoder",)
    assert by_text["lora_te1_"].underscored
    assert not by_text["model.diffusion_model."].underscored


def test_a_table_tells_which_rows_of_a_files_layer_are_whose() -> None:
    own = key_table(NATIVE, SHAPES)
    assert own["blocks.0.attn.to_q"] == (Rows("blocks.0.attn.to_q", 0, 6, 0),)
    table = key_table(ORIGINAL, SHAPES)
    assert table["double.1.qkv"] == (
        Rows("blocks.1.attn.to_q", 0, 6, 0),
        Rows("blocks.1.attn.to_k", 6, 12, 0),
        Rows("blocks.1.attn.to_v", 12, 18, 0),
    )
    # The original has shift before scale: rows of one layer in another order.
    assert table["final.mod"] == (
        Rows("norm_out.linear", 0, 6, 6),
        Rows("norm_out.linear", 6, 12, 0),
    )
    covered = [one.layer for rows in table.values() for one in rows]
    assert set(covered) == set(layers_of(SHAPES))


def test_every_format_counts_once() -> None:
    known = (NATIVE, DIT.lora[0].checkpoint_format, ORIGINAL)
    assert set(checkpoint_formats(DIT, MODEL)) == set(known)


def test_a_declared_program_without_prefixes_has_its_default_ones() -> None:
    declared = LoraKeyFormat("kohya", checkpoint_format=ORIGINAL)
    found = key_formats(replace(DIT, lora=(declared,)), MODEL)
    assert found["kohya"] == LoraKeyFormat("kohya", ("lora_unet_",), ORIGINAL)


def test_a_format_that_is_read_only_is_none_to_write() -> None:
    declared = LoraKeyFormat("theirs", ("x.",), ORIGINAL, read_only=True)
    component = replace(DIT, lora=(*DIT.lora, declared), formats=())
    assert "theirs" not in key_formats(component, MODEL)
    assert ORIGINAL in checkpoint_formats(component, MODEL)


@pytest.mark.parametrize("text", ["lora_unet_", "lora_transformer_", "lycoris_"])
def test_trainers_prefixes_are_those_of_the_denoisers(text: str) -> None:
    (found,) = [prefix for prefix in prefixes(MODEL) if prefix.text == text]
    assert found.components == ("dit", "dit2") and found.underscored


def test_names_whose_underscored_forms_are_equal_are_left_out() -> None:
    table = key_table(
        NATIVE, {"a.b_c.weight": (1, 1), "a_b.c.weight": (1, 1), "a.d.weight": (1, 1)}
    )
    assert with_underscores(table) == {"a_d": (Rows("a.d", 0, 1, 0),)}
    names: set[str] = set()
    for one in checkpoint_formats(DIT, MODEL):
        names.update(with_underscores(key_table(one, SHAPES)))
    assert {"blocks_0_attn_to_q", "double_0_qkv"} <= names


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("blocks.{last}.to_q", ["blocks.10.to_q"]),
        ("blocks.*.to_q", ["blocks.2.to_q", "blocks.10.to_q"]),
        ("other.{last}.x", []),
        ("to_q", []),
    ],
)
def test_last_stands_for_the_highest_number(pattern: str, found: list[str]) -> None:
    names = ["blocks.2.to_q", "blocks.10.to_q", "blocks.10.norm", "blocks.x.to_q"]
    if "*" in pattern:
        found = [*found, "blocks.x.to_q"]
    assert matching_names([pattern], names) == found


def test_unused_layers_are_those_whose_weight_matches() -> None:
    names = ("blocks.0.text.weight", "blocks.1.text.weight", "blocks.1.text.bias")
    assert unused_layers(("blocks.{last}.text.*",), names) == {"blocks.1.text"}
    assert torch.Size(SHAPES["blocks.1.text.weight"]) == (6, 6)
