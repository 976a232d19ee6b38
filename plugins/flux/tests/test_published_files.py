"""Published files are told by their places and by the names and shapes of their weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from dstrain import ModelConfig, Pipeline
from dstrain.models import NATIVE, component_at, components_of, find
from dstrain.models.configs import infer_config
from dstrain.plugin import Component
from dstrain_flux import MODEL, TRANSFORMERS
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, SiglipConfig, SiglipModel, T5EncoderModel

from tests.support.layouts import digest_of, layout_digest, layout_shapes
from tests.support.toys import opened, toy

COMPONENTS = components_of(MODEL)
CLASSES = {
    "dit": FluxTransformer2DModel,
    "text_encoder_1": CLIPTextModel,
    "text_encoder_2": T5EncoderModel,
    "vae": AutoencoderKL,
}
OWNER = "black-forest-labs"
DEV = f"{OWNER}/FLUX.1-dev"
REDUX = f"{OWNER}/FLUX.1-Redux-dev"
UNION = "InstantX/FLUX.1-dev-Controlnet-Union-alpha"
UPSCALER = "jasperai/Flux.1-dev-Controlnet-Upscaler"
INPAINT = "alimama-creative/FLUX.1-dev-Controlnet-Inpainting-Beta"
SIGLIP = "google/siglip-so400m-patch14-384"
# Model id, component, its format (None for the network's own), and the MD5 by which
# DiffSynth-Studio recognizes the file (its configs/model_configs.py).
FILES = [
    (DEV, "dit", 0, "a29710fea6dddb0314663ee823598e50"),
    (f"{OWNER}/FLUX.1-Fill-dev", "dit", 0, "f876d2a6fb247fb7da0f84fc7fb8a823"),
    (UNION, "controlnet", None, "78d18b9101345ff695f312e7e62538c0"),
    (UPSCALER, "controlnet", None, "b001c89139b5f053c715fe772362dd2a"),
    (INPAINT, "controlnet", None, "52357cb26250681367488a8954c271e8"),
    (REDUX, "image_encoder", 0, "6bd5343828144a2135d783519c665e2c"),
    (REDUX, "redux", None, "d8ea4618391460bc831fddaae5fb5288"),
]
SIZES = {"text_encoder_1": 123_060_480, "text_encoder_2": 4_762_310_656}
"""Parameters of the published networks."""
TEXT_HALF = MappingProxyType(
    {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "vocab_size": 32000,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    }
)
named = pytest.mark.parametrize("name", CLASSES)


def settings(component: Component, config: Mapping[str, Any] | None) -> str:
    return json.dumps(vars(component.configure(config or {})))


@pytest.mark.parametrize(("model_id", "name", "number", "digest"), FILES)
def test_a_network_is_that_of_its_published_file(
    model_id: str, name: str, number: int | None, digest: str
) -> None:
    component = COMPONENTS[name]
    layout = NATIVE if number is None else component.formats[number]
    assert layout_digest(component, component.published[model_id], layout) == digest


def test_the_ip_adapter_is_two_dictionaries_in_one_file() -> None:
    component = COMPONENTS["ipadapter"]
    config = component.published["InstantX/FLUX.1-dev-IP-Adapter"]
    found = layout_shapes(component, config)
    layout: dict[str, dict[str, Any]] = {}
    for name, shape in found.items():
        outer, _, inner = name.partition(".")
        layout.setdefault(outer, {})[inner] = shape
    assert list(layout) == ["image_proj", "ip_adapter"]
    assert digest_of(layout) == "4daaa66cc656a8fe369908693dad0a35"
    assert component.infer is not None
    assert component.configure(component.infer(found)) == component.configure({})


def test_a_siglip_with_its_texts_half_has_ours_beside_it() -> None:
    component = COMPONENTS["image_encoder"]
    vision = component.published[SIGLIP]
    text = {**TEXT_HALF, "num_hidden_layers": vision["num_hidden_layers"]}
    with torch.device("meta"):
        config = SiglipConfig(text_config=text, vision_config=dict(vision))
        whole = SiglipModel(config).state_dict()
    layout = component.formats[1]
    others = {
        name: tuple(one.shape) for name, one in whole.items() if layout.ignores(name)
    }
    ours = layout_shapes(component, vision, layout)
    assert digest_of({**ours, **others}) == "04d8c1e20a1f1b25f7434f111992a33f"


def test_a_whole_siglip_is_loaded_by_its_vision_half_alone(tmp_path: Path) -> None:
    sides = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    texts = {"vocab_size": 40, "max_position_embeddings": 8}
    ids = {"bos_token_id": None, "eos_token_id": None}
    config = SiglipConfig(
        text_config={**sides, **texts, **ids},
        vision_config={**sides, "image_size": 28, "patch_size": 14},
    )
    whole = SiglipModel(config)
    whole.save_pretrained(tmp_path)
    component = COMPONENTS["image_encoder"]
    file = ModelConfig(path=str(tmp_path / "model.safetensors"))
    found = find(MODEL, (file,), ("image_encoder",))
    assert found.files.keys() == {"image_encoder"}
    loaded: Any = component.network.load(
        found.files["image_encoder"],
        component.configure(found.configs["image_encoder"]),
        torch.float32,
    )
    ours, theirs = loaded.state_dict(), whole.vision_model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())


@pytest.mark.parametrize("model_id", COMPONENTS["controlnet"].published)
def test_a_controlnet_is_told_by_its_weights(model_id: str) -> None:
    component = COMPONENTS["controlnet"]
    published = component.published[model_id]
    assert component.infer is not None
    told = component.infer(layout_shapes(component, published))
    assert settings(component, told) == settings(component, published)


@pytest.mark.parametrize("name", SIZES)
def test_an_encoder_has_the_published_size(name: str) -> None:
    shapes = layout_shapes(COMPONENTS[name], COMPONENTS[name].published[DEV])
    assert sum(torch.Size(one).numel() for one in shapes.values()) == SIZES[name]


@named
def test_a_network_of_the_published_shapes_is_the_published_one(name: str) -> None:
    component = COMPONENTS[name]
    published = component.published[DEV]
    assert infer_config(component, layout_shapes(component, published)) == published
    assert component.published.keys() == TRANSFORMERS.keys()
    others = layout_shapes(component, toy("flux", "dev") / component.folder / CONFIG)
    assert infer_config(component, others) is None


CONFIG = "config.json"


def test_schnell_gets_no_guidance_and_other_sizes_are_inferred() -> None:
    component = COMPONENTS["dit"]
    published = component.published[f"{OWNER}/FLUX.1-schnell"]
    assert published["guidance_embeds"] is False
    small = {"num_layers": 2, "num_single_layers": 3, "num_attention_heads": 4}
    small |= {"in_channels": 96, "out_channels": 64}
    config = {**published, **small}
    assert component.infer is not None
    assert component.infer(layout_shapes(component, config)) == config


@pytest.mark.filterwarnings("default")
@named
def test_a_network_is_loaded_as_its_library_loads_it(name: str) -> None:
    pipe, folder = opened("flux", "dev"), toy("flux", "dev") / COMPONENTS[name].folder
    ours, theirs = pipe.components[name], CLASSES[name].from_pretrained(folder)
    assert not ours.training
    for one, other in (
        (ours.state_dict(), theirs.state_dict()),
        (dict(ours.named_parameters()), dict(theirs.named_parameters())),
        (dict(ours.named_buffers()), dict(theirs.named_buffers())),
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    known = pipe.configs[name]
    if name.startswith("text"):
        known, own = known.to_dict(), ours.config.to_dict()
        assert {**known, "dtype": own["dtype"]} == own
    else:
        own = {k: one for k, one in ours.config.items() if not k.startswith("_")}
        assert vars(known) == own


@pytest.mark.parametrize("kept", ["shared.weight", "encoder.embed_tokens.weight"])
def test_t5_is_loaded_from_either_name_of_its_embedding(
    kept: str, tmp_path: Path
) -> None:
    folder = toy("flux", "dev")
    weights: dict[str, Any] = {}
    for path in (folder / "text_encoder_2").glob("*.safetensors"):
        weights |= load_file(path)
    embedding = weights.pop("shared.weight")
    file = tmp_path / "t5.safetensors"
    save_file({**weights, kept: embedding}, file)
    (tmp_path / CONFIG).write_bytes((folder / "text_encoder_2" / CONFIG).read_bytes())
    found = ModelConfig(path=str(file))
    t5 = Pipeline.from_pretrained(folder, [found], "dev").components["text_encoder_2"]
    assert t5.shared.weight is t5.encoder.embed_tokens.weight
    assert torch.equal(t5.shared.weight, embedding)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("flux1-dev.safetensors", "dit"),
        ("text_encoder/model.safetensors", "text_encoder_1"),
        ("text_encoder_2/*.safetensors", "text_encoder_2"),
        ("ae.safetensors", "vae"),
        ("vae/diffusion_pytorch_model.safetensors", "vae"),
    ],
)
def test_a_file_is_told_by_its_place_so_that_a_stage_fetches_only_its_own(
    pattern: str, name: str
) -> None:
    config = ModelConfig(None, f"{OWNER}/Any", pattern)
    assert component_at(config, list(COMPONENTS.values())) == name
