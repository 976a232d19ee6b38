"""Networks of published sizes have the names and shapes of the published files."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from dstrain.models import empty_component
from dstrain.models.formats import checkpoint_shapes, shapes_of
from dstrain.models.networks import empty_network
from dstrain_flux.components import COMPONENTS
from transformers import SiglipConfig, SiglipModel

from tests.support.layouts import digest_of

BY_NAME = {component.name: component for component in COMPONENTS}
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
OWNER = "black-forest-labs"
UNION = "InstantX/FLUX.1-dev-Controlnet-Union-alpha"
INPAINT = "alimama-creative/FLUX.1-dev-Controlnet-Inpainting-Beta"
REDUX = f"{OWNER}/FLUX.1-Redux-dev"
# Model id, component, its format (None for the network's own), and the MD5 by which
# DiffSynth-Studio recognizes the file (its configs/model_configs.py).
FILES = [
    (f"{OWNER}/FLUX.1-dev", "dit", 0, "a29710fea6dddb0314663ee823598e50"),
    (f"{OWNER}/FLUX.1-Fill-dev", "dit", 0, "f876d2a6fb247fb7da0f84fc7fb8a823"),
    (UNION, "controlnet", None, "78d18b9101345ff695f312e7e62538c0"),
    (
        "jasperai/Flux.1-dev-Controlnet-Upscaler",
        "controlnet",
        None,
        "b001c89139b5f053c715fe772362dd2a",
    ),
    (INPAINT, "controlnet", None, "52357cb26250681367488a8954c271e8"),
    (REDUX, "image_encoder", 0, "6bd5343828144a2135d783519c665e2c"),
    (REDUX, "redux", None, "d8ea4618391460bc831fddaae5fb5288"),
]


def shapes(model_id: str, name: str) -> Mapping[str, Any]:
    """The shapes of a component of a published model, without memory for it."""
    component = BY_NAME[name]
    network = empty_component(component, component.published[model_id])
    assert network is not None
    return shapes_of(network.state_dict())


@pytest.mark.parametrize(("model_id", "name", "number", "digest"), FILES)
def test_a_published_file_is_that_of_its_network(
    model_id: str, name: str, number: int | None, digest: str
) -> None:
    found = shapes(model_id, name)
    if number is not None:
        found = checkpoint_shapes(BY_NAME[name].formats[number], found)
    assert digest_of(found) == digest


def test_the_ip_adapter_is_two_dictionaries_in_one_file() -> None:
    found = shapes("InstantX/FLUX.1-dev-IP-Adapter", "ipadapter")
    layout: dict[str, dict[str, Any]] = {}
    for name, shape in found.items():
        outer, _, inner = name.partition(".")
        layout.setdefault(outer, {})[inner] = shape
    assert list(layout) == ["image_proj", "ip_adapter"]
    assert digest_of(layout) == "4daaa66cc656a8fe369908693dad0a35"
    infer = BY_NAME["ipadapter"].infer
    assert infer is not None
    published = BY_NAME["ipadapter"].configure({})
    assert BY_NAME["ipadapter"].configure(infer(found) or {}) == published


def test_a_siglip_with_its_texts_half_has_ours_beside_it() -> None:
    model_id = "google/siglip-so400m-patch14-384"
    vision = BY_NAME["image_encoder"].published[model_id]
    text = {**TEXT_HALF, "num_hidden_layers": vision["num_hidden_layers"]}
    config = SiglipConfig(text_config=text, vision_config=dict(vision))
    whole = shapes_of(empty_network(lambda: SiglipModel(config)).state_dict())
    whole_format = BY_NAME["image_encoder"].formats[1]
    ours = checkpoint_shapes(whole_format, shapes(model_id, "image_encoder"))
    others = {name: one for name, one in whole.items() if whole_format.ignores(name)}
    assert digest_of({**ours, **others}) == "04d8c1e20a1f1b25f7434f111992a33f"


@pytest.mark.parametrize("model_id", BY_NAME["controlnet"].published)
def test_the_configuration_of_a_controlnet_follows_from_its_weights(
    model_id: str,
) -> None:
    component = BY_NAME["controlnet"]
    assert component.infer is not None
    found = component.infer(shapes(model_id, "controlnet"))
    assert found is not None
    published = component.published[model_id]
    one, other = (vars(component.configure(config)) for config in (found, published))
    assert json.dumps(one) == json.dumps(other)
