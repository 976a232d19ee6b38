"""Published files are told by their places and by the names and shapes of their weights."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from dstrain import ModelConfig, Pipeline
from dstrain.models import components_of, find
from dstrain.models.configs import infer_config
from dstrain_flux import MODEL, TRANSFORMERS
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, SiglipConfig, SiglipModel, T5EncoderModel

from tests.support.layouts import PublishedFiles, digest_of, layout_shapes
from tests.support.toys import toy

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


class TestPublishedFiles(PublishedFiles):
    family = MODEL
    files = (
        ("dit", DEV, 0, "a29710fea6dddb0314663ee823598e50"),
        ("dit", f"{OWNER}/FLUX.1-Fill-dev", 0, "f876d2a6fb247fb7da0f84fc7fb8a823"),
        ("controlnet", UNION, None, "78d18b9101345ff695f312e7e62538c0"),
        ("controlnet", UPSCALER, None, "b001c89139b5f053c715fe772362dd2a"),
        ("controlnet", INPAINT, None, "52357cb26250681367488a8954c271e8"),
        ("image_encoder", REDUX, 0, "6bd5343828144a2135d783519c665e2c"),
        ("redux", REDUX, None, "d8ea4618391460bc831fddaae5fb5288"),
    )
    told = tuple(("controlnet", one) for one in COMPONENTS["controlnet"].published)
    libraries = tuple(("dev", name, kind) for name, kind in CLASSES.items())
    places = (
        ("flux1-dev.safetensors", "dit"),
        ("text_encoder/model.safetensors", "text_encoder_1"),
        ("text_encoder_2/*.safetensors", "text_encoder_2"),
        ("ae.safetensors", "vae"),
        ("vae/diffusion_pytorch_model.safetensors", "vae"),
    )


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


@pytest.mark.parametrize("name", SIZES)
def test_an_encoder_has_the_published_size(name: str) -> None:
    shapes = layout_shapes(COMPONENTS[name], COMPONENTS[name].published[DEV])
    assert sum(torch.Size(one).numel() for one in shapes.values()) == SIZES[name]


@pytest.mark.parametrize("name", CLASSES)
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
