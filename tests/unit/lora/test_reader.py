"""LoRA files of every naming are recognized, used to the last key, and acted on
exactly.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, StateError, save_lora
from dstrain.config import LoraFile
from dstrain.lora import add_layers, read_lora
from safetensors.torch import load_file

from tests.support.lora_family import (
    ENCODER_SHAPES,
    MODEL,
    SHAPES,
    Change,
    Encoder,
    Header,
    adapter,
    as_trained,
    default_names,
    down_up,
    folded,
    in_names_of,
    network,
    ours,
    output,
    prefixed,
    read,
    trained,
    with_alpha,
    written,
)  # fmt: skip

# Every naming, as its program writes it.


def test_a_fused_layer_of_another_program_is_split_exactly(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    down, up = torch.randn(2, 6, generator=draw), torch.randn(18, 2, generator=draw)
    tensors = {
        "lora_unet_double_1_qkv.lora_down.weight": down,
        "lora_unet_double_1_qkv.lora_up.weight": up,
    }
    tensors["lora_unet_double_1_qkv.alpha"] = torch.tensor(3.0)
    layers = read(written(tmp_path / "x.safetensors", tensors)).layers
    assert list(layers) == [f"blocks.1.attn.to_{x}" for x in "qkv"]
    for i, layer in enumerate(layers.values()):
        assert torch.equal(layer.down, down)
        assert torch.equal(layer.up, up[6 * i : 6 * i + 6])
        assert layer.alpha == 3.0


# What other programs and people make of such files.


def older(tensors: dict[str, Any]) -> dict[str, Any]:
    """Keys of earlier versions of diffusers."""
    return {
        key.replace(".lora_", ".lora."): value
        for key, value in with_alpha(down_up(tensors)).items()
    }


ACCEPTED: tuple[tuple[str, Change, Header], ...] = (
    ("diffusers' names, alpha in the header alone", dict, adapter()),
    ("alpha keys, no header", with_alpha, {}),
    ("alpha keys and the header", with_alpha, adapter()),
    ("alpha as whole numbers", lambda t: {k: v.long() if "alpha" in k else v for k, v in with_alpha(t).items()}, {}),
    ("lora_down and lora_up in diffusers' names", lambda t: with_alpha(down_up(t)), {}),
    ("diffusers' older lora.down", older, {}),
    ("ComfyUI's prefix, diffusers' names", lambda t: with_alpha(prefixed(t, "diffusion_model.")), {}),
    ("a checkpoint's prefix", lambda t: with_alpha(prefixed(t, "model.diffusion_model.")), {}),
    ("no prefix", lambda t: with_alpha(prefixed(t, "")), {}),
    ("peft's prefix", lambda t: with_alpha(prefixed(t, "base_model.model.")), {}),
    ("peft's prefix before diffusers'", lambda t: with_alpha(prefixed(t, "base_model.model.transformer.")), {}),
    ("DiffSynth-Studio's names", lambda t: prefixed(default_names(folded(t)), ""), {}),
    ("DiffSynth-Studio's with its prefix", lambda t: prefixed(default_names(folded(t)), "pipe.dit."), {}),
    *((f"{prefix} with diffusers' names",
       lambda t, prefix=prefix: {k.replace("transformer.", prefix).replace(
           ".", "_", k.count(".") - 3 + (".alpha" in k)): v for k, v in with_alpha(down_up(t)).items()}, {})
      for prefix in ("lora_transformer_", "lycoris_")),
    ("kohya with diffusers' names",
     lambda t: {k.replace("transformer.", "lora_unet_").replace(".", "_", k.count(".") - 3 + (".alpha" in k)): v
                for k, v in with_alpha(down_up(t)).items()}, {}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "header"),
    [row[1:] for row in ACCEPTED],
    ids=[row[0] for row in ACCEPTED],
)
def test_the_same_layers_in_other_words_act_the_same(
    change: Change, header: Header, tmp_path: Path
) -> None:
    lora_config = LoraConfig("dit", ("to_q",), 4, 6.0)
    module = trained(lora_config)
    changed = written(
        tmp_path / "x.safetensors", change(as_trained(lora_config)), header
    )
    plain = network()
    add_layers(plain, read(changed).layers)
    assert torch.allclose(output(plain), output(module), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_of_half_precision_are_computed_in_fp32(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    path, _ = ours(tmp_path)
    halves = {key: value.to(dtype) for key, value in load_file(path).items()}
    module = network()
    add_layers(
        module, read(written(tmp_path / "x.safetensors", with_alpha(halves))).layers
    )
    assert {p.dtype for name, p in module.named_parameters() if "lora_" in name} == {
        torch.float32
    }


def test_peft_keeps_rank_and_alpha_in_a_file_beside_it(tmp_path: Path) -> None:
    lora_config = LoraConfig("dit", ("to_q",), 4, 6.0)
    module = trained(lora_config)
    bare = prefixed(as_trained(lora_config), "base_model.model.")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"r": 4, "lora_alpha": 6, "target_modules": ["to_q"]})
    )
    plain = network()
    add_layers(
        plain, read(written(tmp_path / "adapter_model.safetensors", bare)).layers
    )
    assert torch.equal(output(plain), output(module))


# What a model lacks.


def test_what_a_model_lacks_is_left_out_on_request_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = as_trained(LoraConfig("dit", ("to_q",), 4, 6.0))
    key = "transformer.blocks.{}.attn.k_img.lora_{}.weight"
    for block in (0, 1):
        tensors[key.format(block, "A")] = torch.ones(4, 6)
        tensors[key.format(block, "B")] = torch.ones(6, 4)
    wide = "transformer.proj_in.lora_{}.weight"
    tensors |= {
        wide.format("A"): torch.ones(4, 36),
        wide.format("B"): torch.ones(6, 4),
    }
    encoder = "lora_te1_layers_0_q_proj.lora_{}.weight"
    tensors |= {
        encoder.format("down"): torch.ones(2, 6),
        encoder.format("up"): torch.ones(6, 2),
    }
    path = written(tmp_path / "x y.safetensors", with_alpha(tensors))
    with pytest.raises(StateError, match="for text_encoder, which is not l") as caught:
        read(path)
    assert caught.value.help_lines[-1] == (
        f"to leave out what the model lacks, give '{path}@skip_missing'"
    )
    (lora,) = read_lora(LoraFile(path, skip_missing=True), MODEL, {"dit": SHAPES})
    assert sorted(lora.layers) == ["blocks.0.attn.to_q", "blocks.1.attn.to_q"]
    printed = capsys.readouterr().err
    assert (
        "left out 3, layers that dit lacks: blocks.*.attn.k_img (2), proj_in" in printed
    )
    assert "left out 1, text_encoder, not loaded: layers_*_q_proj" in printed


def test_a_file_that_fits_nowhere_is_refused_whatever_is_left_out(
    tmp_path: Path,
) -> None:
    tensors = {
        "transformer.unet.lora_A.weight": torch.ones(4, 6),
        "transformer.unet.lora_B.weight": torch.ones(6, 4),
    }
    path = written(tmp_path / "x.safetensors", with_alpha(tensors))
    for skip in (False, True):
        with pytest.raises(StateError, match="1 of its 1 layers match no naming"):
            read_lora(LoraFile(path, skip_missing=skip), MODEL, {"dit": SHAPES})
    tensors = {
        "transformer.proj_in.lora_A.weight": torch.ones(4, 7),
        "transformer.proj_in.lora_B.weight": torch.ones(6, 4),
    }
    path = written(tmp_path / "y.safetensors", with_alpha(tensors))
    with pytest.raises(StateError, match="has no layers for what is loaded"):
        read_lora(LoraFile(path, skip_missing=True), MODEL, {"dit": SHAPES})


def test_text_encoders_in_the_same_file_get_their_own(tmp_path: Path) -> None:
    encoder = LoraConfig("text_encoder", ("q_proj",), 2, 2.0)
    save_lora(
        tmp_path / "e.safetensors",
        trained(encoder, Encoder),
        encoder,
        "text_encoder",
        {},
    )
    tensors = with_alpha(down_up(load_file(tmp_path / "e.safetensors")))
    te = {
        key.replace("text_encoder.layers.0.", "lora_te1_layers_0_"): value
        for key, value in tensors.items()
    }
    both = written(tmp_path / "x.safetensors", {**in_names_of("kohya", tmp_path), **te})
    found = read_lora(
        LoraFile(both), MODEL, {"dit": SHAPES, "text_encoder": ENCODER_SHAPES}
    )
    assert {lora.component: len(lora.layers) for lora in found} == {
        "dit": 12,
        "text_encoder": 1,
    }
    with pytest.raises(
        StateError,
        match=r"has 1 layer for text_encoder, which is not loaded\n.*lora_te1_layers_0_q_proj",
    ):
        read(both)


@pytest.mark.parametrize(
    "fields",
    [
        {"bias": "none"},
        {"use_dora": False},
        {"peft_version": "0.1"},
        {"peft_type": "LORA"},
    ],
)
def test_fields_of_the_header_that_change_nothing_are_accepted(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    path, _ = ours(tmp_path, LoraConfig("dit", ("to_q",), 4, 6.0))
    read(written(tmp_path / "x.safetensors", load_file(path), adapter(**fields)))


def test_our_own_header_tells_half_a_file_in_every_naming(tmp_path: Path) -> None:
    header = {"component": "dit", "targets": "to_out.0,to_q"}
    tensors = in_names_of(
        "kohya", tmp_path, LoraConfig("dit", ("to_q", "to_out.0"), 4, 6.0)
    )
    read(written(tmp_path / "x.safetensors", tensors, header))
    half = {key: value for key, value in tensors.items() if "double_1_proj" not in key}
    with pytest.raises(
        StateError,
        match=r"1 layer that its header names as targets.*\n.*blocks\.1\.attn\.to_out\.0",
    ):
        read(written(tmp_path / "x.safetensors", half, header))
    unused = {"dit": {"blocks.{last}.attn.to_out.*"}}
    assert (
        len(
            read_lora(
                LoraFile(tmp_path / "x.safetensors"),
                MODEL,
                {"dit": SHAPES},
                unused_parameters=unused,
            )[0].layers
        )
        == 3
    )
