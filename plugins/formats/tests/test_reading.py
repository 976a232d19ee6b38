"""LoRA files of every naming are recognized, used to the last key, and acted on
exactly; each layer is of the component whose names it has.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, StateError
from dstrain.config import LoraFile
from dstrain.lora import add_layers, read_lora, save_lora_for
from dstrain.plugin import CheckpointFormat, LoraKeyFormat
from dstrain.plugin.lora import groups_in
from dstrain_formats.reading import OtherNames, is_key_of_lora_file
from safetensors.torch import load_file

from tests.support.lora_family import (
    COMPONENTS,
    ENCODER_SHAPES,
    MODEL,
    ORIGINAL,
    REFERENCE,
    SHAPES,
    Change,
    Encoder,
    Header,
    Tensors,
    adapter,
    as_trained,
    default_names,
    down_up,
    folded,
    network,
    output,
    prefixed,
    read,
    trained,
    with_alpha,
    written,
)

PATH = Path("x.safetensors")
TO_Q = LoraConfig("dit", ("to_q",), 4, 6.0)


def older(tensors: Tensors) -> Tensors:
    """Keys of earlier versions of diffusers."""
    found = with_alpha(down_up(tensors))
    return {key.replace(".lora_", ".lora."): value for key, value in found.items()}


def other_prefix(prefix: str) -> Change:
    return lambda tensors: with_alpha(prefixed(tensors, prefix))


def diffsynth(prefix: str) -> Change:
    return lambda tensors: prefixed(default_names(folded(tensors)), prefix)


def underscored(prefix: str) -> Change:
    """Diffusers' names with '_' for '.', as trainers write them."""

    def change(tensors: Tensors) -> Tensors:
        found = {}
        for key, value in with_alpha(down_up(tensors)).items():
            layer, part = re.split(r"\.(?=lora_|alpha)", key, maxsplit=1)
            name = layer.removeprefix("transformer.").replace(".", "_")
            found[f"{prefix}{name}.{part}"] = value
        return found

    return change


def whole_alphas(tensors: Tensors) -> Tensors:
    found = with_alpha(tensors)
    return {k: v.long() if "alpha" in k else v for k, v in found.items()}


ACCEPTED: dict[str, tuple[Change, Header]] = {
    "diffusers' names, alpha in the header alone": (dict, adapter()),
    "alpha keys, no header": (with_alpha, {}),
    "alpha keys and the header": (with_alpha, adapter()),
    "alpha as whole numbers": (whole_alphas, {}),
    "lora_down and lora_up in diffusers' names": (lambda t: with_alpha(down_up(t)), {}),
    "diffusers' older lora.down": (older, {}),
    "ComfyUI's prefix, diffusers' names": (other_prefix("diffusion_model."), {}),
    "a checkpoint's prefix": (other_prefix("model.diffusion_model."), {}),
    "no prefix": (other_prefix(""), {}),
    "peft's prefix": (other_prefix("base_model.model."), {}),
    "peft's before diffusers'": (other_prefix("base_model.model.transformer."), {}),
    "DiffSynth-Studio's names": (diffsynth(""), {}),
    "DiffSynth-Studio's with its prefix": (diffsynth("pipe.dit."), {}),
    "OneTrainer": (underscored("lora_transformer_"), {}),
    "LyCORIS": (underscored("lycoris_"), {}),
    "kohya with diffusers' names": (underscored("lora_unet_"), {}),
}


@pytest.mark.parametrize(("change", "header"), ACCEPTED.values(), ids=ACCEPTED)
def test_the_same_layers_in_other_words_act_the_same(
    change: Change, header: Header, tmp_path: Path
) -> None:
    tensors = change(as_trained(TO_Q))
    assert all(is_key_of_lora_file(key) or key.endswith(".alpha") for key in tensors)
    plain = network()
    add_layers(plain, read(written(tmp_path / PATH, tensors, header)).layers)
    assert torch.allclose(output(plain), output(trained(TO_Q)), atol=1e-5)


def test_peft_keeps_rank_and_alpha_in_a_file_beside_its_own(tmp_path: Path) -> None:
    """It is read for names that begin as peft's, or a file of the name of peft's."""
    beside = {"r": 4, "lora_alpha": 6, "target_modules": ["to_q"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(beside))
    bare = as_trained(TO_Q)
    peft = prefixed(bare, "base_model.model.")
    for name, tensors in (
        ("x", peft),
        ("adapter_model", bare),
        ("adapter_model", peft),
    ):
        plain = network()
        path = written(tmp_path / f"{name}.safetensors", tensors)
        add_layers(plain, read(path).layers)
        assert torch.equal(output(plain), output(trained(TO_Q)))
    with pytest.raises(StateError, match="@alpha=rank"):
        read(written(tmp_path / PATH, bare))
    # The header comes first.
    header = {"lora_adapter_metadata": json.dumps({"r": 4, "lora_alpha": 1})}
    found = read(written(tmp_path / PATH, peft, header))
    assert {layer.alpha for layer in found.layers.values()} == {1.0}


@pytest.mark.parametrize("scale", [1, 0], ids=["trained", "before training"])
def test_a_fused_layer_of_another_program_is_split_exactly(
    scale: int, tmp_path: Path
) -> None:
    """Rows of one layer may be in another order: the original has shift before scale."""
    draw = torch.Generator().manual_seed(0)
    down = torch.randn(2, 6, generator=draw)
    up = scale * torch.randn(18, 2, generator=draw)
    own = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(3.0)}
    tensors = {f"lora_unet_double_1_qkv.{part}": one for part, one in own.items()}
    own["lora_up.weight"] = up[:12]
    tensors |= {f"lora_unet_final_mod.{part}": one for part, one in own.items()}
    layers = read(written(tmp_path / PATH, tensors)).layers
    swapped = layers.pop("norm_out.linear")
    assert torch.equal(swapped.up, torch.cat([up[6:12], up[:6]]))
    assert list(layers) == [f"blocks.1.attn.to_{part}" for part in "qkv"]
    for i, layer in enumerate(layers.values()):
        assert torch.equal(layer.down, down)
        assert torch.equal(layer.up, up[6 * i : 6 * i + 6])
        assert layer.alpha == 3.0


def pair(name: str, rank: int = 4, rows: int = 6, columns: int = 6) -> Tensors:
    """A LoRA of one layer, of ones."""
    return {
        f"{name}.lora_A.weight": torch.ones(rank, columns),
        f"{name}.lora_B.weight": torch.ones(rows, rank),
    }


def test_what_a_model_lacks_is_left_out_on_request_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = as_trained(TO_Q)
    for name in ("blocks.0.attn.k_img", "blocks.1.attn.k_img"):
        tensors |= pair(f"transformer.{name}")
    tensors |= pair("transformer.proj_in", columns=36)
    tensors |= down_up(pair("lora_te1_layers_0_q_proj", 2))
    path = written(tmp_path / "x y.safetensors", with_alpha(tensors))
    with pytest.raises(StateError, match=r"1 .* text_encoder") as caught:
        read(path)
    assert f"'{path}@skip_missing'" in caught.value.help_lines[-1]
    (lora,) = read_lora(LoraFile(path, skip_missing=True), MODEL, {"dit": SHAPES})
    assert sorted(lora.layers) == ["blocks.0.attn.to_q", "blocks.1.attn.to_q"]
    printed = capsys.readouterr().err
    assert re.search(r" 3, .* dit .*: blocks\.\*\.attn\.k_img \(2\), proj_in", printed)
    assert re.search(r" 1, text_encoder, .*: layers_\*_q_proj", printed)


@pytest.mark.parametrize("skip_missing", [False, True])
def test_a_file_that_fits_nowhere_is_refused_whatever_is_left_out(
    skip_missing: bool, tmp_path: Path
) -> None:
    for name, columns in (("unet", 6), ("proj_in", 7)):
        tensors = with_alpha(pair(f"transformer.{name}", columns=columns))
        path = written(tmp_path / f"{name}.safetensors", tensors)
        file = LoraFile(path, skip_missing=skip_missing)
        with pytest.raises(StateError) as caught:
            read_lora(file, MODEL, {"dit": SHAPES})
        assert caught.value.where == str(path)
        is_advised = "@skip_missing" in str(caught.value)
        assert is_advised == (name == "proj_in" and not skip_missing)


def test_text_encoders_in_the_same_file_get_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = LoraConfig("text_encoder", ("q_proj",), 2, 2.0)
    tensors = {}
    for config, kind in ((TO_Q, {}), (encoder, {"kind": Encoder})):
        path = tmp_path / config.component
        save_lora_for("kohya", path, trained(config, **kind), config, MODEL, {})
        tensors |= load_file(path)
    both = written(tmp_path / PATH, tensors)
    networks = {"dit": SHAPES, "text_encoder": ENCODER_SHAPES}
    found = read_lora(LoraFile(both), MODEL, networks)
    assert {one.component: len(one.layers) for one in found} == {
        "dit": 2,
        "text_encoder": 1,
    }
    with pytest.raises(StateError, match=r"1 .* text_encoder(?s:.*)lora_te1_layers_0"):
        read(both)
    file = LoraFile(both, component="dit")
    with pytest.raises(StateError, match=r"text_encoder, .*dit"):
        read_lora(file, MODEL, networks)
    for asked in (file, replace(file, skip_missing=True)):
        (one,) = read_lora(asked, MODEL, networks, is_one_of_several=True)
        assert one.component == "dit"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"bias": "none"},
        {"use_dora": False},
        {"revision": "x"},
        {"peft_type": "LORA"},
        {"target_modules": "all-linear"},
        {"newer": None},
    ],
)
def test_fields_of_the_header_that_change_nothing_are_accepted(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    path = written(tmp_path / PATH, as_trained(TO_Q), adapter(**fields))
    assert len(read(path).layers) == 2


def test_experts_are_distinguished_by_the_header_or_by_what_is_asked(
    tmp_path: Path,
) -> None:
    two = {"dit": SHAPES, "dit2": SHAPES}
    tensors = as_trained()
    bare = written(tmp_path / "x.safetensors", with_alpha(tensors))
    for file, ending in (
        (LoraFile(bare), ""),
        (LoraFile(bare, 0.5, skip_missing=True), ":0.5@skip_missing"),
    ):
        with pytest.raises(StateError, match=r" 2 .* dit .* dit2") as caught:
            read_lora(file, MODEL, two)
        # As it was typed.
        for name in two:
            assert f"{name}={bare}{ending}" in caught.value.help_lines[0]
    (chosen,) = read_lora(LoraFile(bare, component="dit2"), MODEL, two)
    assert chosen.component == "dit2"
    header = {"component": "dit2"}
    named = written(tmp_path / "y.safetensors", with_alpha(tensors), header)
    assert read(named, **two).component == "dit2"
    with pytest.raises(StateError, match="dit2, not for dit"):
        read_lora(LoraFile(named, component="dit"), MODEL, two)
    with pytest.raises(StateError, match=r"12 .* dit2"):
        read(named)
    pipe = default_names(prefixed(tensors, "pipe.dit2."))
    assert read(written(tmp_path / "z.safetensors", pipe), **two).component == "dit2"


@pytest.mark.parametrize(
    ("own", "layer"),
    [
        (("proj_in", "img_in"), "transformer.img_in"),
        (("a.b_c", "a_b.c"), "lora_unet_a_b_c"),
    ],
    ids=["of two formats", "with '_' for '.'"],
)
def test_names_that_fit_in_two_ways_are_refused(
    own: tuple[str, ...], layer: str, tmp_path: Path
) -> None:
    path = written(tmp_path / PATH, with_alpha(pair(layer)))
    with pytest.raises(StateError, match="dit"):
        read(path, dit={f"{name}.weight": (6, 6) for name in own})
    assert read(path, dit={f"{own[-1]}.weight": (6, 6)})


VACE = replace(
    COMPONENTS[0],
    name="vace",
    key_patterns=("vace_blocks.*",),
    formats=(CheckpointFormat(("x",), ignored=("blocks.*",)),),
    lora=(
        LoraKeyFormat("kohya", ("lora_unet_",), underscored=True),
        LoraKeyFormat("theirs", ("theirs.",), REFERENCE, read_only=True),
    ),
)
SHARING = (
    *(
        replace(one, formats=(replace(ORIGINAL, ignored=("vace_blocks.*",)),))
        for one in COMPONENTS[:2]
    ),
    VACE,
)
FAMILY = replace(
    MODEL,
    components=f"{__name__}:SHARING",
    lora_prefixes=MappingProxyType(
        dict.fromkeys(("dit", "dit2", "vace"), "transformer")
    ),
)


@pytest.mark.parametrize("prefix", ["transformer.", "diffusion_model.", "lora_unet_"])
def test_names_that_a_networks_files_leave_to_another_are_not_its_own(
    prefix: str,
) -> None:
    """Those that may be of either are of the group that says more."""
    names = ["blocks.0.attn.k", "img_emb.proj.1", "vace_blocks.0.attn.q"]
    if prefix.endswith("_"):
        names = [one.replace(".", "_") for one in names]
    tensors = {}
    for one in names:
        tensors |= pair(f"{prefix}{one}")
    dit, vace = groups_in(PATH, tensors, FAMILY, OtherNames())
    assert (dit.prefix.components, [*dit.layers]) == (("dit", "dit2"), names[:2])
    assert (vace.prefix.components, [*vace.layers]) == (("vace",), names[2:])
    assert dit.prefix.text == prefix
