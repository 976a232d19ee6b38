"""Original and ComfyUI files of FLUX load into the same networks as those of diffusers,
at any width.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from dstrain import ModelConfig, StateError
from dstrain.models import assign, components_of, find, recognize, to_checkpoint
from dstrain.plugin import Files
from dstrain_flux import MODEL
from torch import Tensor

from tests.support.layouts import assert_equal, load_as, network_of_noise, saved
from tests.support.toys import toy

COMPONENTS = components_of(MODEL)
KNOWN = tuple(COMPONENTS.values())
ORIGINAL_DIT, REFERENCE_DIT = COMPONENTS["dit"].formats
# Original name -> name in modelscope/DiffSynth-Studio, of its
# utils/state_dict_converters/flux_dit.py.
REFERENCE_NAMES = {
    "time_in.in_layer": "time_embedder.timestep_embedder.0",
    "time_in.out_layer": "time_embedder.timestep_embedder.2",
    "vector_in.in_layer": "pooled_text_embedder.0",
    "vector_in.out_layer": "pooled_text_embedder.2",
    "guidance_in.in_layer": "guidance_embedder.timestep_embedder.0",
    "guidance_in.out_layer": "guidance_embedder.timestep_embedder.2",
    "txt_in": "context_embedder",
    "img_in": "x_embedder",
    "final_layer.linear": "final_proj_out",
    "final_layer.adaLN_modulation.1": "final_norm_out.linear",
    "double_blocks.*.img_attn.qkv": "blocks.*.attn.a_to_qkv",
    "double_blocks.*.txt_attn.qkv": "blocks.*.attn.b_to_qkv",
    "double_blocks.*.img_attn.proj": "blocks.*.attn.a_to_out",
    "double_blocks.*.txt_attn.proj": "blocks.*.attn.b_to_out",
    "double_blocks.*.img_mlp.0": "blocks.*.ff_a.0",
    "double_blocks.*.img_mlp.2": "blocks.*.ff_a.2",
    "double_blocks.*.txt_mlp.0": "blocks.*.ff_b.0",
    "double_blocks.*.txt_mlp.2": "blocks.*.ff_b.2",
    "double_blocks.*.img_mod.lin": "blocks.*.norm1_a.linear",
    "double_blocks.*.txt_mod.lin": "blocks.*.norm1_b.linear",
    "double_blocks.*.img_attn.norm.query_norm.scale": "blocks.*.attn.norm_q_a.weight",
    "double_blocks.*.img_attn.norm.key_norm.scale": "blocks.*.attn.norm_k_a.weight",
    "double_blocks.*.txt_attn.norm.query_norm.scale": "blocks.*.attn.norm_q_b.weight",
    "double_blocks.*.txt_attn.norm.key_norm.scale": "blocks.*.attn.norm_k_b.weight",
    "single_blocks.*.linear1": "single_blocks.*.to_qkv_mlp",
    "single_blocks.*.linear2": "single_blocks.*.proj_out",
    "single_blocks.*.modulation.lin": "single_blocks.*.norm.linear",
    "single_blocks.*.norm.query_norm.scale": "single_blocks.*.norm_q_a.weight",
    "single_blocks.*.norm.key_norm.scale": "single_blocks.*.norm_k_a.weight",
}
NAMES = ("dit", "vae", "text_encoder_1", "text_encoder_2")
State = Mapping[str, Tensor]


def make(name: str, **changes: Any) -> Any:
    """Return a network whose weights differ from each other."""
    return network_of_noise(COMPONENTS[name], toy("flux", "dev"), **changes)


def original(name: str, network: Any) -> dict[str, Tensor]:
    """Return the weights under the names and in the shapes of the original files."""
    state = dict(network.state_dict())
    if name == "text_encoder_2":
        del state["encoder.embed_tokens.weight"]
        return state
    old = to_checkpoint(COMPONENTS[name].formats[0], state)
    if name == "vae":
        for key, one in old.items():
            if ".attn_1." in key and one.dim() == 2:
                old[key] = one[..., None, None]
    return old


def comfyui() -> dict[str, Tensor]:
    """Return all networks in one file, as ComfyUI writes them."""
    clip, t5 = "text_encoders.clip_l.", "text_encoders.t5xxl."
    weights = {f"{part}logit_scale": torch.ones(()) for part in (clip, t5)}
    weights[f"{clip}transformer.text_projection.weight"] = torch.ones(2, 2)
    prefixes = ("model.diffusion_model.", "vae.", f"{clip}transformer.")
    for name, prefix in zip(NAMES, (*prefixes, f"{t5}transformer."), strict=True):
        part = original(name, make(name))
        weights |= {f"{prefix}{key}": weight for key, weight in part.items()}
    return weights


def part_of(path: Path, weights: State, name: str) -> Files:
    """Save a file, in which this component alone is; return its part."""
    (((found,), part),) = recognize(Files((saved(path, weights),)), KNOWN)
    assert found is COMPONENTS[name]
    return part


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("name", NAMES)
def test_an_original_file_loads_as_the_network_that_it_was_made_from(
    name: str, path: Path
) -> None:
    network = make(name)
    part = part_of(path, original(name, network), name)
    assert_equal(
        load_as(COMPONENTS[name], part, network).state_dict(), network.state_dict()
    )


def as_reference(name: str) -> str:
    """Return DiffSynth-Studio's name of a weight that has this name in original files."""
    known, kind = re.sub(r"(?<=blocks\.)\d+", "*", name), ""
    if known not in REFERENCE_NAMES:
        known, _, kind = known.rpartition(".")
    number = re.search(r"(?<=blocks\.)\d+", name)
    renamed = REFERENCE_NAMES[known].replace("*", number[0] if number else "*")
    return f"{renamed}.{kind}" if kind else renamed


def test_a_file_of_the_reference_loads_as_the_network_that_it_was_made_from(
    path: Path,
) -> None:
    network = make("dit")
    old = original("dit", network)
    weights = {as_reference(name): weight for name, weight in old.items()}
    part = part_of(path, weights, "dit")
    assert part.checkpoint_format == REFERENCE_DIT
    assert_equal(
        load_as(COMPONENTS["dit"], part, network).state_dict(), network.state_dict()
    )
    assert to_checkpoint(REFERENCE_DIT, network.state_dict()).keys() == weights.keys()


def test_one_file_of_comfyui_gives_every_component(path: Path) -> None:
    found = assign(
        [ModelConfig(path=str(saved(path, comfyui())))], KNOWN, ("dit", "vae")
    )
    assert set(found) == set(NAMES)
    for name, files in found.items():
        network = make(name)
        assert_equal(
            load_as(COMPONENTS[name], files, network).state_dict(), network.state_dict()
        )


@pytest.mark.parametrize("prefix", COMPONENTS["dit"].prefixes)
def test_a_transformer_alone_may_have_comfyuis_prefix(prefix: str, path: Path) -> None:
    network = make("dit")
    old = original("dit", network)
    weights = {f"{prefix}{key}": weight for key, weight in old.items()}
    part = part_of(path, weights, "dit")
    assert part.prefix == prefix
    assert_equal(
        load_as(COMPONENTS["dit"], part, network).state_dict(), network.state_dict()
    )


@pytest.mark.parametrize("guided", [True, False])
def test_the_transformers_names_are_those_that_diffusers_converts(guided: bool) -> None:
    network = make("dit", guidance_embeds=guided)
    function = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers
    # The published width is written into it.
    code = function.__code__
    constants = tuple(32 if one == 3072 else one for one in code.co_consts)
    assert constants != code.co_consts
    narrow = FunctionType(code.replace(co_consts=constants), function.__globals__)
    assert_equal(narrow(original("dit", network)), network.state_dict())


def test_the_autoencoders_names_are_those_that_diffusers_converts() -> None:
    network = make("vae", layers_per_block=2, block_out_channels=[8, 16, 16, 24])
    old = original("vae", network)
    converted = single_file_utils.convert_ldm_vae_checkpoint(old, dict(network.config))
    assert_equal(converted, network.state_dict())


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("dit", "single_blocks.1.linear2.weight"),
        ("vae", "decoder.up.0.block.1.conv2.bias"),
        ("text_encoder_1", "text_model.encoder.layers.1.mlp.fc2.weight"),
    ],
)
def test_what_a_file_lacks_is_named_as_it_would_be_there(
    name: str, lost: str, path: Path
) -> None:
    network = make(name)
    weights = original(name, network)
    weights["stranger.weight"] = weights.pop(lost)
    part = part_of(path, weights, name)
    with pytest.raises(StateError) as error:
        load_as(COMPONENTS[name], part, network)
    assert f": {lost}\n" in str(error.value)
    assert "stranger.weight" in str(error.value)


def test_whole_blocks_that_a_file_lacks_and_wrong_shapes_are_named_as_in_the_file(
    path: Path,
) -> None:
    network = make("dit", num_layers=2)
    weights = original("dit", network)
    some = {
        key: weight
        for key, weight in weights.items()
        if not key.startswith("double_blocks.1.")
    }
    with pytest.raises(StateError, match=r"double_blocks\.1\.img_mod\.lin\.weight"):
        load_as(COMPONENTS["dit"], part_of(path, some, "dit"), network)
    fused = "double_blocks.0.txt_attn.qkv.weight"
    weights[fused] = torch.zeros(97, 32)
    with pytest.raises(StateError, match=fused):
        load_as(COMPONENTS["dit"], part_of(path, weights, "dit"), network)


@pytest.mark.parametrize("guided", [True, False])
def test_the_configuration_of_an_original_transformer_follows_from_its_shapes(
    guided: bool, path: Path
) -> None:
    heads = {"attention_head_dim": 128, "num_attention_heads": 1}
    network = make("dit", **heads, axes_dims_rope=[16, 56, 56], guidance_embeds=guided)
    other = {"_class_name": "AnotherModel", "num_layers": 77}
    path.with_name("config.json").write_text(json.dumps(other))
    part_of(path, original("dit", network), "dit")
    content = find(MODEL, (ModelConfig(path=str(path)),), ("dit",)).configs["dit"]
    own = {key: one for key, one in network.config.items() if not key.startswith("_")}
    assert vars(COMPONENTS["dit"].configure(content)) == own
