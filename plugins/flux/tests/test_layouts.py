"""Networks of published sizes have the names and shapes of the published files."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from dstrain.models.formats import checkpoint_shapes, shapes_of
from dstrain.models.networks import empty_component
from dstrain.testing.layouts import layout_digest
from dstrain_flux.components import COMPONENTS

BY_NAME = {component.name: component for component in COMPONENTS}
OWNER = "black-forest-labs"
UNION = "InstantX/FLUX.1-dev-Controlnet-Union-alpha"
INPAINT = "alimama-creative/FLUX.1-dev-Controlnet-Inpainting-Beta"
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
    assert layout_digest(found) == digest


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
