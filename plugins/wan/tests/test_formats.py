"""Original and ComfyUI files of Wan load into the same networks as those of diffusers,
at any width.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from dstrain import ModelConfig, StateError
from dstrain.models import NATIVE, assign, components_of, find, recognize, to_checkpoint
from dstrain.plugin import Files
from dstrain_wan import MODEL
from torch import Tensor

from tests.support.layouts import assert_equal, load_as, network_of_noise, saved
from tests.support.toys import toy

COMPONENTS = components_of(MODEL)
KNOWN = tuple(COMPONENTS.values())
WIDER = {"num_layers": 3, "num_attention_heads": 3, "text_dim": 40}
DITS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "2.1 and 2.2 t2v": ("dit", "t2v", {}),
    "2.1 i2v": ("dit", "i2v", {}),
    "2.1 flf2v": ("dit", "flf2v", {}),
    "2.2 i2v": ("dit", "i2v-a14b", {}),
    "2.2 ti2v": ("dit", "ti2v-5b", {}),
    "wider and deeper": ("dit", "t2v", WIDER),
}
CASES = {
    **DITS,
    "vae 2.1": ("vae", "t2v", {"num_res_blocks": 2}),
    "vae 2.2": ("vae", "ti2v-5b", {"num_res_blocks": 2, "decoder_base_dim": 16}),
    "text": ("text_encoder", "t2v", {}),
    "image": ("image_encoder", "i2v", {}),
}
"""Component, the variant of its toy, and what is otherwise."""
State = Mapping[str, Tensor]


def make(case: str) -> Any:
    """Return a network whose weights differ from each other."""
    name, variant, changes = CASES[case]
    return network_of_noise(COMPONENTS[name], toy("wan", variant), **changes)


def original(case: str, network: Any) -> dict[str, Tensor]:
    """Return the weights under the names and in the shapes of the original files."""
    name, *_ = CASES[case]
    state = dict(network.state_dict())
    number = int(name == "vae" and not network.config.is_residual)
    if name == "text_encoder":
        del state["encoder.embed_tokens.weight"]
    old = to_checkpoint(COMPONENTS[name].formats[number], state)
    if name != "image_encoder":
        return old
    old["visual.cls_embedding"] = old["visual.cls_embedding"][None, None]
    old["visual.pos_embedding"] = old["visual.pos_embedding"][None]
    return old | {
        "log_scale": torch.ones(()),
        "visual.head": torch.ones(16, 8),
        "textual.norm.weight": torch.ones(4),
    }


def load(case: str, files: Files, network: Any) -> Any:
    """Load a component's part of files, which it alone is in, into a new network."""
    component = COMPONENTS[CASES[case][0]]
    ((fitting, part),) = recognize(files, KNOWN)
    assert fitting[0] is component
    return load_as(component, part, network)


def assert_loads(case: str, path: Path, weights: State, network: Any) -> None:
    files = Files((saved(path, weights),))
    assert_equal(load(case, files, network).state_dict(), network.state_dict())


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("case", CASES)
def test_an_original_file_loads_as_the_network_that_it_was_made_from(
    case: str, suffix: str, tmp_path: Path
) -> None:
    network = make(case)
    path = tmp_path / f"model.{suffix}"
    assert_loads(case, path, original(case, network), network)
    ((_, part),) = recognize(Files((path,)), KNOWN)
    assert part.checkpoint_format is not NATIVE


@pytest.mark.parametrize(
    "case", ["2.1 and 2.2 t2v", "2.1 i2v", "2.2 ti2v", "wider and deeper", "vae 2.1"]
)
def test_names_are_those_that_diffusers_converts(case: str) -> None:
    network = make(case)
    kind = "vae" if case.startswith("vae") else "transformer"
    convert = getattr(single_file_utils, f"convert_wan_{kind}_to_diffusers")
    assert_equal(convert(original(case, network)), network.state_dict())


PAIRS = {
    "text": """
        encoder.block.1.layer.1.DenseReluDense.wi_0.weight blocks.1.ffn.gate.0.weight
        encoder.block.1.layer.1.DenseReluDense.wi_1.weight blocks.1.ffn.fc1.weight
        encoder.block.1.layer.1.DenseReluDense.wo.weight blocks.1.ffn.fc2.weight
        encoder.block.0.layer.0.layer_norm.weight blocks.0.norm1.weight
        encoder.block.0.layer.1.layer_norm.weight blocks.0.norm2.weight
        encoder.block.0.layer.0.SelfAttention.k.weight blocks.0.attn.k.weight
        encoder.block.0.layer.0.SelfAttention.o.weight blocks.0.attn.o.weight
    """,
    "image": """
        encoder.layers.2.mlp.fc1.bias visual.transformer.2.mlp.0.bias
        encoder.layers.2.self_attn.out_proj.bias visual.transformer.2.attn.proj.bias
        encoder.layers.2.layer_norm2.bias visual.transformer.2.norm2.bias
        pre_layrnorm.weight visual.pre_norm.weight
        post_layernorm.weight visual.post_norm.weight
    """,
    "vae 2.2": """
        quant_conv.bias conv1.bias
        encoder.mid_block.resnets.1.norm2.gamma encoder.middle.2.residual.3.gamma
        encoder.down_blocks.1.resnets.0.conv_shortcut.bias
        encoder.downsamples.1.downsamples.0.shortcut.bias
        encoder.down_blocks.1.downsampler.time_conv.bias
        encoder.downsamples.1.downsamples.2.time_conv.bias
        decoder.up_blocks.3.resnets.2.conv2.bias
        decoder.upsamples.3.upsamples.2.residual.6.bias
        decoder.up_blocks.0.upsampler.resample.1.bias
        decoder.upsamples.0.upsamples.3.resample.1.bias
        decoder.norm_out.gamma decoder.head.0.gamma
    """,
    "2.1 flf2v": """
        condition_embedder.image_embedder.pos_embed img_emb.emb_pos
    """,
}
"""Names of diffusers or transformers, each with the original's module of the same use, where
diffusers has no converter.
"""


@pytest.mark.parametrize("case", PAIRS)
def test_other_names_are_of_the_originals_module_of_the_same_use(case: str) -> None:
    network = make(case)
    old, state = original(case, network), network.state_dict()
    names = PAIRS[case].split()
    pairs = zip(names[::2], names[1::2], strict=True)
    assert [file for own, file in pairs if not torch.equal(old[file], state[own])] == []


def test_the_image_encoders_fused_weight_is_query_key_value() -> None:
    network = make("image")
    parts = [
        network.state_dict()[f"encoder.layers.1.self_attn.{part}_proj.weight"]
        for part in "qkv"
    ]
    fused = original("image", network)["visual.transformer.1.attn.to_qkv.weight"]
    assert torch.equal(fused, torch.cat(parts))


@pytest.mark.parametrize("case", ["2.1 i2v", "vae 2.1", "vae 2.2", "text", "image"])
def test_what_a_file_lacks_is_named_as_it_would_be_there(
    case: str, tmp_path: Path
) -> None:
    network = make(case)
    weights = original(case, network)
    lost = max(key for key in weights if ".0." in key and not key.startswith("textual"))
    del weights[lost]
    weights["stranger.weight"] = torch.ones(1)
    files = Files((saved(tmp_path / "model.pth", weights),))
    with pytest.raises(StateError) as error:
        load(case, files, network)
    assert f": {lost}\n" in str(error.value)
    assert "stranger.weight" in str(error.value)


def test_a_weight_of_another_shape_is_refused_by_its_name_in_the_file(
    tmp_path: Path,
) -> None:
    network = make("image")
    name = "visual.transformer.0.attn.to_qkv.weight"
    weights = {**original("image", network), name: torch.zeros(48, 17)}
    files = Files((saved(tmp_path / "model.pth", weights),))
    with pytest.raises(StateError, match=name):
        load("image", files, network)


def test_comfyuis_text_encoder_loads_without_the_tokenizer_in_its_file(
    tmp_path: Path,
) -> None:
    network = make("text")
    weights = dict(network.state_dict())
    del weights["encoder.embed_tokens.weight"]
    weights["spiece_model"] = torch.zeros(9, dtype=torch.uint8)
    assert_loads("text", tmp_path / "umt5.safetensors", weights, network)


def test_the_text_encoders_words_are_one_weight_however_often_the_file_has_it(
    tmp_path: Path,
) -> None:
    network = make("text")
    path = tmp_path / "model.safetensors"
    weights = dict(network.state_dict())
    assert {"shared.weight", "encoder.embed_tokens.weight"} <= weights.keys()
    assert_loads("text", path, weights, network)
    again = load("text", Files((path,)), network)
    assert again.shared.weight is again.encoder.embed_tokens.weight


def test_one_file_of_comfyui_gives_every_component(tmp_path: Path) -> None:
    cases = {"dit": "2.1 and 2.2 t2v", "vae": "vae 2.1", "text_encoder": "text"}
    networks = {name: make(case) for name, case in cases.items()}
    text = "text_encoders.umt5xxl."
    parts = {
        "model.diffusion_model.": original(cases["dit"], networks["dit"]),
        "vae.": original("vae 2.1", networks["vae"]),
        f"{text}transformer.": dict(networks["text_encoder"].state_dict()),
        text: {"logit_scale": torch.ones(())},
    }
    weights = {
        f"{prefix}{key}": weight
        for prefix, part in parts.items()
        for key, weight in part.items()
    }
    path = saved(tmp_path / "all.safetensors", weights)
    found = assign([ModelConfig(path=str(path))], KNOWN, ("dit", "vae"))
    assert set(found) == set(networks)
    for name, part in found.items():
        again = load_as(COMPONENTS[name], part, networks[name])
        assert_equal(again.state_dict(), networks[name].state_dict())


@pytest.mark.parametrize("prefix", (*COMPONENTS["image_encoder"].prefixes, ""))
def test_the_published_image_encoder_loads_with_the_halves_nobody_needs(
    prefix: str, tmp_path: Path
) -> None:
    network = make("image")
    weights = {
        f"{prefix}vision_model.{key}": weight
        for key, weight in network.state_dict().items()
    }
    ids = torch.zeros(1, 5, dtype=torch.int64)
    weights[f"{prefix}vision_model.embeddings.position_ids"] = ids
    assert_loads("image", tmp_path / "model.safetensors", weights, network)


def published_content(network: Any) -> str:
    """Return config.json as the original repositories have it."""
    config = network.config
    names = {
        "in_dim": "in_channels",
        "out_dim": "out_channels",
        "num_heads": "num_attention_heads",
        **{one: one for one in ("eps", "ffn_dim", "freq_dim", "num_layers")},
    }
    content = {name: getattr(config, own) for name, own in names.items()}
    content["dim"] = config.num_attention_heads * config.attention_head_dim
    other = {"_class_name": "WanModel", "_diffusers_version": "0.30.0"}
    return json.dumps({**other, **content, "model_type": "t2v", "text_len": 512})


@pytest.mark.parametrize("case", DITS)
def test_the_originals_configuration_is_read_in_diffusers_terms(
    case: str, tmp_path: Path
) -> None:
    network = make(case)
    (tmp_path / "config.json").write_text(published_content(network))
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    saved(path, original(case, network))
    found = find(MODEL, (ModelConfig(path=str(path)),), ("dit",)).configs["dit"]
    read = vars(COMPONENTS["dit"].configure(found))
    own = {key: one for key, one in network.config.items() if not key.startswith("_")}
    wanted = {**own, "rope_max_seq_len": 1024}
    assert json.dumps(read, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def test_the_transformers_config_json_is_not_taken_for_that_of_the_vae_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", str(tmp_path))
    model_id = "Wan-AI/Wan2.1-T2V-1.3B"
    folder = tmp_path / model_id
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(published_content(make("2.1 and 2.2 t2v")))
    saved(folder / "Wan2.1_VAE.pth", original("vae 2.1", make("vae 2.1")))
    files = (ModelConfig(None, model_id, "Wan2.1_VAE.pth"),)
    content = find(MODEL, files, ("vae",)).configs["vae"]
    assert content["z_dim"] == 16
    assert "dim" not in content


def test_experts_are_told_by_their_folders_else_by_their_order(tmp_path: Path) -> None:
    case = "2.1 and 2.2 t2v"
    weights = original(case, make(case))
    folders = ("low_noise_model", "high_noise_model", "elsewhere", "transformer_2")
    for folder in folders:
        (tmp_path / folder).mkdir()
        for name in "ab":
            saved(tmp_path / folder / f"{name}.safetensors", weights)

    def experts(*paths: str) -> dict[str, str]:
        configs = [
            ModelConfig(path=str(tmp_path / f"{path}.safetensors")) for path in paths
        ]
        found = assign(configs, KNOWN, ("dit", "dit2"))
        return {
            part: str(files.paths[0].relative_to(tmp_path).with_suffix(""))
            for part, files in found.items()
        }

    low, high = "low_noise_model/a", "high_noise_model/a"
    first, second = "elsewhere/a", "elsewhere/b"
    assert experts(low, high) == {"dit": high, "dit2": low}
    assert experts(first, second) == {"dit": first, "dit2": second}
    assert experts(first, high) == {"dit": high, "dit2": first}
    assert experts(low) == {"dit2": low}
    assert experts("transformer_2/a", first) == {
        "dit": first,
        "dit2": "transformer_2/a",
    }
    assert experts(first) == {"dit": first}
