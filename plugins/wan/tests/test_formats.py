"""Original and ComfyUI files of Wan load into the same networks as those of diffusers,
at any width.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.loaders import single_file_utils
from dstrain import ModelConfig, StateError
from dstrain.models import NATIVE, assign, recognize, to_checkpoint
from dstrain.models.configs import ConfigQuery, find_config
from dstrain.models.hub import ModelSource
from dstrain.plugin import Files
from dstrain_wan.components import COMPONENTS, CONFIGS
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

BY_NAME = {component.name: component for component in COMPONENTS}
TOY = json.loads((CONFIGS / "toy.json").read_bytes())
SIZES = TOY["networks"]
CHANGES = {name: one.get("networks", {}) for name, one in TOY["variants"].items()}
VAE_5B = CHANGES["ti2v-5b"]["vae"]
ENDS = {**CHANGES["i2v"]["dit"], "pos_embed_seq_len": 10}
NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    "dit": lambda **changes: WanTransformer3DModel(**{**SIZES["dit"], **changes}),
    "vae": lambda **changes: AutoencoderKLWan(**{**SIZES["vae"], **changes}),
    "text_encoder": lambda **changes: UMT5EncoderModel(
        UMT5Config(**{**SIZES["text_encoder"], "vocab_size": 50, **changes})
    ),
    "image_encoder": lambda **changes: CLIPVisionModel(
        CLIPVisionConfig(**{**CHANGES["i2v"]["image_encoder"], **changes})
    ),
}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "2.1 and 2.2 t2v": ("dit", {}),
    "2.1 i2v": ("dit", CHANGES["i2v"]["dit"]),
    "2.1 flf2v": ("dit", ENDS),
    "2.2 i2v": ("dit", CHANGES["i2v-a14b"]["dit"]),
    "2.2 ti2v": ("dit", CHANGES["ti2v-5b"]["dit"]),
    "wider and deeper": (
        "dit",
        {"num_layers": 3, "num_attention_heads": 3, "text_dim": 40},
    ),
    "vae 2.1": ("vae", {"num_res_blocks": 2}),
    "vae 2.2": ("vae", {**VAE_5B, "num_res_blocks": 2, "decoder_base_dim": 16}),
    "text": ("text_encoder", {}),
    "image": ("image_encoder", {}),
}
each = pytest.mark.parametrize("case", CASES)


def make(case: str) -> tuple[str, nn.Module]:
    torch.manual_seed(0)
    name, changes = CASES[case]
    network = NETWORKS[name](**changes)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()  # no two equal, as norms are when they are new
    return name, network


def original(name: str, network: nn.Module) -> dict[str, Tensor]:
    """The network's weights under the names and in the shapes of the original files."""
    state = dict(network.state_dict())
    formats = BY_NAME[name].formats
    if name == "vae":
        nested, flat = formats
        levels_nest = dict(network.config)["is_residual"]
        return to_checkpoint(nested if levels_nest else flat, state)
    if name == "text_encoder":
        del state["encoder.embed_tokens.weight"]
    old = to_checkpoint(formats[0], state)
    if name != "image_encoder":
        return old
    old["visual.cls_embedding"] = old["visual.cls_embedding"][None, None]
    old["visual.pos_embedding"] = old["visual.pos_embedding"][None]
    return old | {
        "log_scale": torch.ones(()),
        "visual.head": torch.ones(16, 8),
        "textual.norm.weight": torch.ones(4),
    }


def load(name: str, files: Files, network: Any) -> nn.Module:
    content = (
        dict(network.config) if name in ("dit", "vae") else network.config.to_dict()
    )
    loaded: nn.Module = BY_NAME[name].network.load(
        files, BY_NAME[name].configure(content), torch.float32
    )
    return loaded


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert set(one) == set(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def saved(path: Path, weights: Mapping[str, Tensor]) -> Files:
    tensors = {
        key: weight.detach().contiguous().clone() for key, weight in weights.items()
    }
    torch.save(tensors, path) if path.suffix == ".pth" else save_file(tensors, path)
    return Files((path,))


def recognized(files: Files, name: str) -> Files:
    ((fitting, part),) = recognize(files, COMPONENTS)
    assert fitting[0].name == name
    return part


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@each
def test_original_files_load_as_the_network_they_were_made_from(
    case: str, suffix: str, tmp_path: Path
) -> None:
    name, network = make(case)
    files = recognized(
        saved(tmp_path / f"model.{suffix}", original(name, network)), name
    )
    assert files.checkpoint_format is not NATIVE
    assert_equal(load(name, files, network).state_dict(), network.state_dict())


@each
def test_files_in_the_networks_own_names_load_too(case: str, tmp_path: Path) -> None:
    name, network = make(case)
    files = recognized(
        saved(tmp_path / "model.safetensors", network.state_dict()), name
    )
    assert files.checkpoint_format is NATIVE
    assert_equal(load(name, files, network).state_dict(), network.state_dict())


@pytest.mark.parametrize(
    "case", ["2.1 and 2.2 t2v", "2.1 i2v", "2.2 ti2v", "wider and deeper"]
)
def test_the_transformers_map_is_that_of_diffusers(case: str) -> None:
    name, network = make(case)
    converted = single_file_utils.convert_wan_transformer_to_diffusers(
        original(name, network)
    )
    assert_equal(converted, network.state_dict())


def test_the_map_of_the_vae_of_2_1_is_that_of_diffusers() -> None:
    name, network = make("vae 2.1")
    assert_equal(
        single_file_utils.convert_wan_vae_to_diffusers(original(name, network)),
        network.state_dict(),
    )


PAIRS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "text": (
        (
            "encoder.block.1.layer.1.DenseReluDense.wi_0.weight",
            "blocks.1.ffn.gate.0.weight",
        ),  # through the activation
        (
            "encoder.block.1.layer.1.DenseReluDense.wi_1.weight",
            "blocks.1.ffn.fc1.weight",
        ),
        ("encoder.block.1.layer.1.DenseReluDense.wo.weight", "blocks.1.ffn.fc2.weight"),
        ("encoder.block.0.layer.0.layer_norm.weight", "blocks.0.norm1.weight"),
        ("encoder.block.0.layer.1.layer_norm.weight", "blocks.0.norm2.weight"),
        ("encoder.block.0.layer.0.SelfAttention.k.weight", "blocks.0.attn.k.weight"),
        ("encoder.block.0.layer.0.SelfAttention.o.weight", "blocks.0.attn.o.weight"),
    ),
    "image": (
        ("encoder.layers.2.mlp.fc1.bias", "visual.transformer.2.mlp.0.bias"),
        (
            "encoder.layers.2.self_attn.out_proj.bias",
            "visual.transformer.2.attn.proj.bias",
        ),
        ("encoder.layers.2.layer_norm2.bias", "visual.transformer.2.norm2.bias"),
        ("pre_layrnorm.weight", "visual.pre_norm.weight"),
        ("post_layernorm.weight", "visual.post_norm.weight"),
    ),
    "vae 2.2": (
        ("quant_conv.bias", "conv1.bias"),
        (
            "encoder.mid_block.resnets.1.norm2.gamma",
            "encoder.middle.2.residual.3.gamma",
        ),
        (
            "encoder.down_blocks.1.resnets.0.conv_shortcut.bias",
            "encoder.downsamples.1.downsamples.0.shortcut.bias",
        ),
        (
            "encoder.down_blocks.1.downsampler.time_conv.bias",
            "encoder.downsamples.1.downsamples.2.time_conv.bias",
        ),
        (
            "decoder.up_blocks.3.resnets.2.conv2.bias",
            "decoder.upsamples.3.upsamples.2.residual.6.bias",
        ),
        (
            "decoder.up_blocks.0.upsampler.resample.1.bias",
            "decoder.upsamples.0.upsamples.3.resample.1.bias",
        ),
        ("decoder.norm_out.gamma", "decoder.head.0.gamma"),
    ),
    "2.1 flf2v": (("condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"),),
}


@pytest.mark.parametrize("case", PAIRS)
def test_what_no_converter_of_diffusers_covers_is_the_originals_module_of_the_same_use(
    case: str,
) -> None:
    name, network = make(case)
    old, state = original(name, network), network.state_dict()
    assert [
        file for own, file in PAIRS[case] if not torch.equal(old[file], state[own])
    ] == []


def test_the_image_encoders_fused_weight_is_query_key_value() -> None:
    name, network = make("image")
    parts = [
        network.state_dict()[f"encoder.layers.1.self_attn.{part}_proj.weight"]
        for part in "qkv"
    ]
    assert torch.equal(
        original(name, network)["visual.transformer.1.attn.to_qkv.weight"],
        torch.cat(parts),
    )


@each
def test_half_a_file_and_surplus_names_are_refused_as_the_file_names_them(
    case: str, tmp_path: Path
) -> None:
    name, network = make(case)
    weights = original(name, network)
    lost = max(key for key in weights if ".0." in key and not key.startswith("textual"))
    del weights[lost]
    files = recognized(
        saved(tmp_path / "model.pth", {**weights, "stranger.weight": torch.ones(1)}),
        name,
    )
    with pytest.raises(StateError) as error:
        load(name, files, network)
    assert f" missing: {lost}\n" in str(error.value)
    assert "1 unexpected: stranger.weight" in str(error.value)


def test_a_weight_of_another_shape_is_refused_by_its_name_in_the_file(
    tmp_path: Path,
) -> None:
    name, network = make("image")
    weights = original(name, network)
    weights["visual.transformer.0.attn.to_qkv.weight"] = torch.zeros(48, 17)
    files = recognized(saved(tmp_path / "model.pth", weights), name)
    with pytest.raises(
        StateError,
        match=r"3 of a different shape: visual\.transformer\.0\.attn\.to_qkv\.weight \(expected",
    ):
        load(name, files, network)


def test_comfyuis_text_encoder_loads_without_the_tokenizer_in_its_file(
    tmp_path: Path,
) -> None:
    name, network = make("text")
    weights = {
        key: weight
        for key, weight in network.state_dict().items()
        if key != "encoder.embed_tokens.weight"
    }
    words = {"spiece_model": torch.zeros(9, dtype=torch.uint8)}
    files = recognized(saved(tmp_path / "umt5.safetensors", weights | words), name)
    assert_equal(load(name, files, network).state_dict(), network.state_dict())


def test_one_file_of_comfyui_gives_every_component(tmp_path: Path) -> None:
    networks = dict(make(case) for case in ("2.1 and 2.2 t2v", "vae 2.1", "text"))
    parts = {
        "model.diffusion_model.": original("dit", networks["dit"]),
        "vae.": original("vae", networks["vae"]),
        "text_encoders.umt5xxl.transformer.": dict(
            networks["text_encoder"].state_dict()
        ),
        "text_encoders.umt5xxl.": {"logit_scale": torch.ones(())},
    }
    weights = {
        f"{prefix}{key}": weight
        for prefix, part in parts.items()
        for key, weight in part.items()
    }
    saved(tmp_path / "all.safetensors", weights)
    found = assign(
        [ModelConfig(path=str(tmp_path / "all.safetensors"))],
        COMPONENTS,
        ("dit", "vae"),
    )
    assert set(found) == set(networks)
    for name, files in found.items():
        assert_equal(
            load(name, files, networks[name]).state_dict(), networks[name].state_dict()
        )


@pytest.mark.parametrize("prefix", (*BY_NAME["image_encoder"].prefixes, ""))
def test_the_published_image_encoder_loads_with_the_halves_nobody_needs(
    prefix: str, tmp_path: Path
) -> None:
    name, network = make("image")
    weights = {
        f"{prefix}vision_model.{key}": weight
        for key, weight in network.state_dict().items()
    }
    ids = {
        f"{prefix}vision_model.embeddings.position_ids": torch.zeros(
            1, 5, dtype=torch.int64
        )
    }
    files = recognized(saved(tmp_path / "model.safetensors", {**weights, **ids}), name)
    assert_equal(load(name, files, network).state_dict(), network.state_dict())


def published_content(network: Any, kind: str) -> dict[str, Any]:
    """config.json as the original repositories have it."""
    c = network.config
    return {
        "_class_name": "WanModel",
        "_diffusers_version": "0.30.0",
        "dim": c.num_attention_heads * c.attention_head_dim,
        "eps": c.eps,
        "ffn_dim": c.ffn_dim,
        "freq_dim": c.freq_dim,
        "in_dim": c.in_channels,
        "model_type": kind,
        "num_heads": c.num_attention_heads,
        "num_layers": c.num_layers,
        "out_dim": c.out_channels,
        "text_len": 512,
    }


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] == "dit"])
def test_the_originals_configuration_is_read_in_diffusers_terms(
    case: str, tmp_path: Path
) -> None:
    name, network = make(case)
    (tmp_path / "config.json").write_text(
        json.dumps(published_content(network, case.rpartition(" ")[2]))
    )
    files = recognized(
        saved(
            tmp_path / "diffusion_pytorch_model.safetensors", original(name, network)
        ),
        name,
    )
    content = find_config(ConfigQuery(BY_NAME[name], files))
    own = {
        key: value
        for key, value in dict(network.config).items()
        if not key.startswith("_")
    }
    if name == "dit":  # what our class has more
        own |= dict.fromkeys(("ref_channels", "camera_channels"))
    read = json.loads(json.dumps(vars(BY_NAME[name].configure(content))))
    assert read == json.loads(json.dumps({**own, "rope_max_seq_len": 1024}))


def test_the_transformers_config_json_is_not_taken_for_that_of_the_vae_beside_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(published_content(make("2.1 and 2.2 t2v")[1], "t2v"))
    )
    files = recognized(
        saved(tmp_path / "Wan2.1_VAE.pth", original(*make("vae 2.1"))), "vae"
    )
    content = find_config(
        ConfigQuery(
            BY_NAME["vae"], files, ModelSource("Wan-AI/Wan2.1-T2V-1.3B", hub=None)
        )
    )
    assert content["z_dim"] == 16
    assert "dim" not in content


def test_experts_are_distinguished_by_their_folders_else_by_their_order(
    tmp_path: Path,
) -> None:
    name, network = make("2.1 and 2.2 t2v")
    for folder in ("low_noise_model", "high_noise_model", "elsewhere"):
        (tmp_path / folder).mkdir()
        for i in range(2):
            saved(tmp_path / folder / f"{i}.safetensors", original(name, network))

    def experts(*paths: str) -> dict[str, str]:
        found = assign(
            [ModelConfig(path=str(tmp_path / path)) for path in paths],
            COMPONENTS,
            ("dit", "dit2"),
        )
        return {
            part: str(files.paths[0].relative_to(tmp_path))
            for part, files in found.items()
        }

    low, high, first, second = (
        f"{folder}.safetensors"
        for folder in (
            "low_noise_model/0",
            "high_noise_model/0",
            "elsewhere/0",
            "elsewhere/1",
        )
    )
    assert experts(low, high) == {"dit": high, "dit2": low}
    assert experts(first, second) == {"dit": first, "dit2": second}
    assert experts(first, high) == {"dit": high, "dit2": first}
    assert experts(low) == {"dit2": low}
    assert experts(first) == {"dit": first}


def test_names_are_those_of_the_published_files() -> None:
    assert {
        "blocks.1.self_attn.norm_q.weight",
        "blocks.0.cross_attn.norm_k_img.weight",
        "blocks.0.modulation",
        "head.modulation",
        "img_emb.proj.4.bias",
        "img_emb.emb_pos",
        "time_projection.1.weight",
    } <= set(original(*make("2.1 flf2v")))
    assert {
        "encoder.downsamples.10.residual.6.weight",
        "encoder.downsamples.5.time_conv.weight",
        "decoder.upsamples.4.shortcut.weight",
        "decoder.upsamples.11.resample.1.weight",
        "decoder.upsamples.14.residual.0.gamma",
        "decoder.middle.1.to_qkv.weight",
        "decoder.head.2.weight",
    } <= set(original(*make("vae 2.1")))
    assert {
        "encoder.downsamples.1.downsamples.2.time_conv.weight",
        "decoder.upsamples.3.upsamples.2.residual.6.bias",
        "decoder.upsamples.0.upsamples.3.resample.1.weight",
    } <= set(original(*make("vae 2.2")))
