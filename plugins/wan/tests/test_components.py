"""Components are recognized by their weights' names, configured without them, and
loaded strictly.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from dstrain import ModelConfig
from dstrain.models import assign, component_at, empty_component, recognize
from dstrain.models.configs import infer_config
from dstrain.plugin import Files
from dstrain_wan.components import COMPONENTS, CONFIGS, infer_dit
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, CLIPVisionModel, UMT5EncoderModel

BY_NAME = {component.name: component for component in COMPONENTS}
VAE_2_1, VAE_2_2 = (
    json.loads((CONFIGS / name).read_bytes())
    for name in ("vae_2_1.json", "vae_2_2.json")
)
NETWORKS = tuple(component for component in COMPONENTS if not component.is_folder)
CLASSES: Mapping[str, Any] = {
    "dit": WanTransformer3DModel,
    "dit2": WanTransformer3DModel,
    "text_encoder": UMT5EncoderModel,
    "vae": AutoencoderKLWan,
    "image_encoder": CLIPVisionModel,
}
WHERE = [
    ("i2v", "dit"),
    ("t2v-a14b", "dit2"),
    ("ti2v-5b", "vae"),
    ("i2v", "text_encoder"),
    ("i2v", "image_encoder"),
]


def weights_of(folder: Path, name: str) -> tuple[Path, ...]:
    return tuple(sorted((folder / BY_NAME[name].folders[0]).glob("*.safetensors")))


def on_meta(name: str, content: Mapping[str, Any]) -> torch.nn.Module:
    network = empty_component(BY_NAME[name], content)
    assert network is not None
    return network


def shapes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in module.state_dict().items()}


@pytest.mark.parametrize(("variant", "name"), WHERE)
def test_marks_recognize_this_component_and_no_other(
    variant: str, name: str, toys: Mapping[str, Path]
) -> None:
    ((fitting, _),) = recognize(Files(weights_of(toys[variant], name)), NETWORKS)
    experts = ("dit", "dit2")
    assert [component.name for component in fitting] == list(
        experts if name in experts else (name,)
    )


def test_the_experts_are_distinguished_by_their_folders(
    toys: Mapping[str, Path],
) -> None:
    experts = [weights_of(toys["i2v-a14b"], name) for name in ("dit2", "dit")]
    configs = [ModelConfig(path=[str(path) for path in paths]) for paths in experts]
    found = assign(configs, COMPONENTS, ["dit", "dit2"])
    assert (found["dit2"].paths, found["dit"].paths) == tuple(experts)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("variant", "name"), WHERE)
def test_loads_the_weights_that_the_library_loads(
    variant: str,
    name: str,
    toys: Mapping[str, Path],
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    ours = bind_components(variant)[name]
    theirs = CLASSES[name].from_pretrained(toys[variant] / BY_NAME[name].folders[0])
    first, second = ours.state_dict(), theirs.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not ours.training
    buffers = dict(theirs.named_buffers())
    assert all(
        torch.equal(buffer, buffers[key]) for key, buffer in ours.named_buffers()
    )


def test_the_text_encoders_words_are_one_weight_however_often_the_file_has_it(
    toys: Mapping[str, Path],
    bind_components: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    loaded = bind_components("t2v")
    encoder = loaded["text_encoder"]
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    (file,) = weights_of(toys["t2v"], "text_encoder")
    weights = load_file(file)
    twice = {**weights, "encoder.embed_tokens.weight": weights["shared.weight"].clone()}
    save_file(twice, tmp_path / "model.safetensors")
    again = BY_NAME["text_encoder"].network.load(
        Files((tmp_path / "model.safetensors",)),
        loaded["text_encoder_config"],
        torch.float32,
    )
    assert again.shared.weight is again.encoder.embed_tokens.weight
    assert torch.equal(again.shared.weight, encoder.shared.weight)


def test_the_image_encoder_loads_from_published_names_too(
    bind_components: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    loaded = bind_components("i2v")
    own = {
        name: weight.clone()
        for name, weight in loaded["image_encoder"].state_dict().items()
    }
    save_file(
        {f"vision_model.{name}": weight for name, weight in own.items()},
        tmp_path / "model.safetensors",
    )
    ((_, files),) = recognize(Files((tmp_path / "model.safetensors",)), NETWORKS)
    again = BY_NAME["image_encoder"].network.load(
        files, loaded["image_encoder_config"], torch.float32
    )
    assert all(
        torch.equal(weight, own[name]) for name, weight in again.state_dict().items()
    )


@pytest.mark.parametrize("name", ["dit", "vae"])
def test_the_configuration_without_weights_equals_the_modules_own(
    name: str, bind_components: Callable[..., dict[str, Any]]
) -> None:
    loaded = bind_components("ti2v-5b")
    own = {
        key: value
        for key, value in loaded[name].config.items()
        if not key.startswith("_")
    }
    assert vars(loaded[f"{name}_config"]) == own


# In thousands of millions, as on the models' pages.
SIZES = {
    "Wan-AI/Wan2.1-T2V-1.3B": 1.42,
    "Wan-AI/Wan2.1-T2V-14B": 14.29,
    "Wan-AI/Wan2.1-I2V-14B-480P": 16.39,
    "Wan-AI/Wan2.2-I2V-A14B": 14.29,
    "Wan-AI/Wan2.2-TI2V-5B": 5.0,
    "Wan-AI/Wan2.1-FLF2V-14B-720P": 16.4,
    "PAI/Wan2.1-Fun-1.3B-InP": 1.56,
}


@pytest.mark.parametrize("model_id", SIZES)
def test_shapes_tell_the_published_configuration_and_size_of_a_transformer(
    model_id: str,
) -> None:
    module = on_meta("dit", BY_NAME["dit"].published[model_id])
    assert (
        round(sum(weight.numel() for weight in module.parameters()) / 1e9, 2)
        == SIZES[model_id]
    )
    told, published = (
        json.dumps(vars(BY_NAME["dit"].configure(one)))
        for one in (
            infer_dit(shapes_of(module)) or {},
            BY_NAME["dit"].published[model_id],
        )
    )
    assert told == published


def test_shapes_of_heads_that_are_not_published_tell_nothing(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    loaded = bind_components("i2v")
    for name in ("dit", "vae", "text_encoder", "image_encoder"):
        assert infer_config(BY_NAME[name], shapes_of(loaded[name])) is None


@pytest.mark.parametrize(
    ("content", "millions"),
    [(VAE_2_1, 126.9), (VAE_2_2, 704.7)],
    ids=["2.1", "2.2"],
)
def test_shapes_tell_the_published_configuration_and_size_of_a_vae(
    content: Mapping[str, Any], millions: float
) -> None:
    module = on_meta("vae", content)
    assert (
        round(sum(weight.numel() for weight in module.parameters()) / 1e6, 1)
        == millions
    )
    assert infer_config(BY_NAME["vae"], shapes_of(module)) == content
    assert (
        len(content["latents_mean"]) == len(content["latents_std"]) == content["z_dim"]
    )


def test_the_vae_of_2_1_is_the_librarys_default() -> None:
    defaults = vars(BY_NAME["vae"].configure({}))
    assert json.dumps(vars(BY_NAME["vae"].configure(VAE_2_1))) == json.dumps(defaults)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("text_encoder", 5_680_910_336), ("image_encoder", 630_766_080)],
)
def test_the_published_configuration_builds_an_encoder_of_the_published_size(
    name: str, parameters: int
) -> None:
    module = on_meta(name, BY_NAME[name].published["Wan-AI/Wan2.1-I2V-14B-480P"])
    sizes = {
        key: weight.numel()
        for key, weight in module.state_dict().items()
        if key != "encoder.embed_tokens.weight"
    }
    assert sum(sizes.values()) == parameters
    assert (
        infer_config(BY_NAME[name], shapes_of(module))
        == BY_NAME[name].published["Wan-AI/Wan2.1-I2V-14B-480P"]
    )


def test_the_tokenizer_loads_from_its_folder(
    toys: Mapping[str, Path], bind_components: Callable[..., dict[str, Any]]
) -> None:
    theirs = AutoTokenizer.from_pretrained(
        toys["t2v"] / "tokenizer", local_files_only=True
    )
    text = "a red dog runs, 红 <pad>"
    ids = bind_components("t2v")["tokenizer"](text).input_ids
    assert ids == theirs(text).input_ids
    assert ids[-1] == 1


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("diffusion_pytorch_model*.safetensors", "dit"),
        ("high_noise_model/diffusion_pytorch_model*.safetensors", "dit"),
        ("low_noise_model/diffusion_pytorch_model*.safetensors", "dit2"),
        ("models_t5_umt5-xxl-enc-bf16.pth", "text_encoder"),
        ("Wan2.1_VAE.pth", "vae"),
        ("Wan2.2_VAE.pth", "vae"),
        ("models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth", "image_encoder"),
        ("google/umt5-xxl/", "tokenizer"),
    ],
)
def test_published_files_are_recognized_by_their_place_so_that_a_stage_fetches_only_its_own(
    pattern: str, name: str
) -> None:
    assert component_at(ModelConfig(None, "Wan-AI/Any", pattern), COMPONENTS) == name
