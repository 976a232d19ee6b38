"""Original and ComfyUI files of FLUX load into the same networks as those of diffusers,
at any width.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from diffusers.loaders import single_file_utils
from dstrain import ModelConfig, StateError
from dstrain.models import assign, recognize, to_checkpoint
from dstrain.models.configs import ConfigQuery, find_config
from dstrain.plugin import Component, Files
from dstrain_flux.components import COMPONENTS, CONFIGS
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

BY_NAME = {component.name: component for component in COMPONENTS}
SIZES = json.loads((CONFIGS / "toy.json").read_bytes())["networks"]
DIT, VAE = SIZES["dit"], SIZES["vae"]
ORIGINAL_DIT, REFERENCE_DIT = BY_NAME["dit"].formats
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
SCHNELL = {**DIT, "guidance_embeds": False}


def make(name: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    builders: dict[str, Callable[[], nn.Module]] = {
        "dit": lambda: FluxTransformer2DModel(**{**DIT, **changes}),
        "vae": lambda: AutoencoderKL(**{**VAE, **changes}),
        "text_encoder_1": lambda: CLIPTextModel(
            CLIPTextConfig(
                **{
                    **SIZES["text_encoder_1"],
                    "vocab_size": 50,
                    "eos_token_id": 49,
                    "bos_token_id": 48,
                }
            )
        ),
        "text_encoder_2": lambda: T5EncoderModel(
            T5Config(**{**SIZES["text_encoder_2"], "vocab_size": 50})
        ),
    }
    return builders[name]()


def original(name: str, network: nn.Module) -> dict[str, Tensor]:
    """The network's weights under the names and in the shapes of the original files."""
    state = network.state_dict()
    if name == "dit":
        return to_checkpoint(ORIGINAL_DIT, state)
    if name == "vae":
        old = to_checkpoint(BY_NAME["vae"].formats[0], state)
        return {
            key: w[..., None, None] if ".attn_1." in key and w.dim() == 2 else w
            for key, w in old.items()
        }
    if name == "text_encoder_1":
        return to_checkpoint(BY_NAME[name].formats[0], state)
    return {
        key: weight
        for key, weight in state.items()
        if key != "encoder.embed_tokens.weight"
    }


def comfyui() -> dict[str, Tensor]:
    """All networks in one file, as ComfyUI writes them."""
    ids = {
        f"{p}logit_scale": torch.ones(())
        for p in ("text_encoders.clip_l.", "text_encoders.t5xxl.")
    }
    ids["text_encoders.clip_l.transformer.text_projection.weight"] = torch.ones(2, 2)
    prefixes = {
        "dit": "model.diffusion_model.",
        "vae": "vae.",
        "text_encoder_1": "text_encoders.clip_l.transformer.",
        "text_encoder_2": "text_encoders.t5xxl.transformer.",
    }
    parts = {name: original(name, make(name)) for name in prefixes}
    return ids | {
        f"{prefixes[name]}{key}": weight
        for name, part in parts.items()
        for key, weight in part.items()
    }


def component_of(name: str) -> Component:
    return BY_NAME[name]


def configured(name: str, network: Any) -> Any:
    content = (
        network.config.to_dict() if name.startswith("text") else dict(network.config)
    )
    return BY_NAME[name].configure(content)


def load(name: str, files: Files, network: nn.Module) -> nn.Module:
    loaded: nn.Module = BY_NAME[name].network.load(
        files, configured(name, network), torch.float32
    )
    return loaded


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def saved(
    folder: Path, weights: Mapping[str, Tensor], name: str = "model.safetensors"
) -> Files:
    save_file(
        {key: weight.contiguous().clone() for key, weight in weights.items()},
        folder / name,
    )
    return Files((folder / name,))


@pytest.mark.parametrize("name", ["dit", "vae", "text_encoder_1", "text_encoder_2"])
def test_original_files_load_as_the_network_they_were_made_from(
    name: str, tmp_path: Path
) -> None:
    network = make(name)
    ((fitting, files),) = recognize(
        saved(tmp_path, original(name, network)), COMPONENTS
    )
    assert [component.name for component in fitting] == [name]
    assert_equal(load(name, files, network).state_dict(), network.state_dict())


def as_reference(name: str) -> str:
    """DiffSynth-Studio's name of a weight that has this name in the original files."""
    pattern = re.sub(r"(?<=blocks\.)\d+", "*", name)
    known, kind = (
        (pattern, "")
        if pattern in REFERENCE_NAMES
        else (pattern.rpartition(".")[0], name.rpartition(".")[2])
    )
    numbers = re.findall(r"(?<=blocks\.)\d+", name)
    return ".".join(
        filter(None, (REFERENCE_NAMES[known].replace("*", *numbers or "*"), kind))
    )


def test_files_of_the_reference_load_as_the_network_they_were_made_from(
    tmp_path: Path,
) -> None:
    network = make("dit")
    weights = {
        as_reference(name): weight for name, weight in original("dit", network).items()
    }
    ((fitting, files),) = recognize(saved(tmp_path, weights), COMPONENTS)
    assert ([component.name for component in fitting], files.checkpoint_format) == (
        ["dit"],
        REFERENCE_DIT,
    )
    assert_equal(load("dit", files, network).state_dict(), network.state_dict())
    assert to_checkpoint(REFERENCE_DIT, network.state_dict()).keys() == weights.keys()


def test_a_transformer_of_other_depth_and_without_guidance_loads_too(
    tmp_path: Path,
) -> None:
    network = make(
        "dit",
        guidance_embeds=False,
        num_layers=3,
        num_single_layers=1,
        num_attention_heads=3,
    )
    weights = original("dit", network)
    assert not any(key.startswith("guidance_in") for key in weights)
    ((_, files),) = recognize(saved(tmp_path, weights), COMPONENTS)
    assert_equal(load("dit", files, network).state_dict(), network.state_dict())


def test_one_file_of_comfyui_gives_every_component(tmp_path: Path) -> None:
    saved(tmp_path, comfyui(), "all.safetensors")
    found = assign(
        [ModelConfig(path=str(tmp_path / "all.safetensors"))],
        COMPONENTS,
        ("dit", "vae"),
    )
    assert set(found) == {"dit", "vae", "text_encoder_1", "text_encoder_2"}
    for name, files in found.items():
        assert_equal(
            load(name, files, make(name)).state_dict(), make(name).state_dict()
        )


@pytest.mark.parametrize("prefix", BY_NAME["dit"].prefixes)
def test_a_transformer_alone_may_have_comfyuis_prefix(
    prefix: str, tmp_path: Path
) -> None:
    network = make("dit")
    weights = {
        f"{prefix}{key}": weight for key, weight in original("dit", network).items()
    }
    ((_, files),) = recognize(saved(tmp_path, weights), COMPONENTS)
    assert files.prefix == prefix
    assert_equal(load("dit", files, network).state_dict(), network.state_dict())


def diffusers_dit(weights: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """What diffusers' converter makes of the file, its fixed width replaced by ours."""
    function = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers
    constants = tuple(
        width if constant == 3072 else constant
        for constant in function.__code__.co_consts
    )
    assert constants != function.__code__.co_consts
    patched = FunctionType(
        function.__code__.replace(co_consts=constants), function.__globals__
    )
    converted: dict[str, Tensor] = patched(dict(weights))
    return converted


@pytest.mark.parametrize("guided", [True, False])
def test_the_transformers_map_is_that_of_diffusers(guided: bool) -> None:
    network = make("dit", guidance_embeds=guided)
    assert_equal(
        dict(sorted(diffusers_dit(original("dit", network), 32).items())),
        dict(sorted(network.state_dict().items())),
    )


def test_the_autoencoders_map_is_that_of_diffusers() -> None:
    network = make("vae", layers_per_block=2, block_out_channels=[8, 16, 16, 24])
    converted = single_file_utils.convert_ldm_vae_checkpoint(
        original("vae", network), VAE
    )
    assert_equal(
        dict(sorted(converted.items())), dict(sorted(network.state_dict().items()))
    )


@pytest.mark.parametrize("name", ["dit", "vae", "text_encoder_1"])
def test_half_a_file_and_surplus_names_are_refused_as_the_file_names_them(
    name: str, tmp_path: Path
) -> None:
    network = make(name)
    weights = original(name, network)
    lost = {
        "dit": "single_blocks.1.linear2.weight",
        "vae": "decoder.up.0.block.1.conv2.bias",
    }.get(name, "text_model.encoder.layers.1.mlp.fc2.weight")
    del weights[lost]
    ((_, files),) = recognize(
        saved(tmp_path, {**weights, "stranger.weight": torch.ones(1)}), COMPONENTS
    )
    with pytest.raises(StateError) as error:
        load(name, files, network)
    assert f"1 missing: {lost}\n" in str(error.value)
    assert "1 unexpected: stranger.weight" in str(error.value)


def test_blocks_that_are_not_in_the_file_are_named_as_they_would_be_there(
    tmp_path: Path,
) -> None:
    network = make("dit", num_layers=2)
    weights = {
        key: w
        for key, w in original("dit", network).items()
        if not key.startswith("double_blocks.1.")
    }
    ((_, files),) = recognize(saved(tmp_path, weights), COMPONENTS)
    with pytest.raises(
        StateError, match=r"\d+ missing: double_blocks\.1\.img_mod\.lin\.weight, "
    ):
        load("dit", files, network)


def test_a_fused_weight_of_another_shape_is_refused_by_its_name(tmp_path: Path) -> None:
    network = make("dit")
    weights = original("dit", network)
    weights["double_blocks.0.txt_attn.qkv.weight"] = torch.zeros(97, 32)
    ((_, files),) = recognize(saved(tmp_path, weights), COMPONENTS)
    with pytest.raises(
        StateError,
        match=r"1 of a different shape: double_blocks\.0\.txt_attn\.qkv\.weight \(expected",
    ):
        load("dit", files, network)


@pytest.mark.parametrize("guided", [True, False])
def test_the_configuration_of_an_original_transformer_follows_from_its_shapes(
    guided: bool, tmp_path: Path
) -> None:
    network = make(
        "dit",
        attention_head_dim=128,
        num_attention_heads=1,
        axes_dims_rope=[16, 56, 56],
        guidance_embeds=guided,
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"_class_name": "AnotherModel", "num_layers": 77})
    )
    ((_, files),) = recognize(saved(tmp_path, original("dit", network)), COMPONENTS)
    content = find_config(ConfigQuery(BY_NAME["dit"], files))
    assert vars(BY_NAME["dit"].configure(content)) == {
        k: v for k, v in network.config.items() if not k.startswith("_")
    }


def test_names_are_those_of_the_published_files() -> None:
    assert {
        "double_blocks.0.img_attn.norm.key_norm.scale",
        "double_blocks.0.txt_mod.lin.bias",
        "single_blocks.1.modulation.lin.weight",
        "final_layer.adaLN_modulation.1.weight",
        "guidance_in.out_layer.bias",
        "vector_in.in_layer.weight",
    } <= set(original("dit", make("dit")))
    assert {
        "encoder.down.0.downsample.conv.weight",
        "encoder.mid.attn_1.proj_out.weight",
        "decoder.up.3.upsample.conv.bias",
        "decoder.up.0.block.0.nin_shortcut.weight",
        "decoder.norm_out.weight",
    } <= set(original("vae", make("vae", block_out_channels=[8, 16, 16, 24])))
