"""Published files are told by their places and by the names and shapes of their weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from dstrain import ModelConfig, Pipeline, StateError
from dstrain.models import NATIVE, components_of
from dstrain.plugin import Component
from dstrain_qwen_image import MODEL
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from tests.support.layouts import layout_digest, layout_shapes
from tests.support.toys import opened, toy

COMPONENTS = components_of(MODEL)
BASE = "Qwen/Qwen-Image"
LAYERED = "Qwen/Qwen-Image-Layered"
CONTROLNET = "DiffSynth-Studio/Qwen-Image-Blockwise-ControlNet-"
CLASSES: Mapping[str, Any] = {
    "dit": QwenImageTransformer2DModel,
    "text_encoder": Qwen2_5_VLForConditionalGeneration,
    "vae": AutoencoderKLQwenImage,
}
named = pytest.mark.parametrize("name", CLASSES)


def settings(component: Component, config: Mapping[str, Any] | None) -> str:
    return json.dumps(vars(component.configure(config or {})))


def weights_of(name: str) -> dict[str, torch.Tensor]:
    """Return the weights of a toy's component as its file has them."""
    weights = {}
    for path in (toy("qwen_image", "base") / name).glob("*.safetensors"):
        weights |= load_file(path)
    return weights


@pytest.mark.parametrize(
    ("name", "model_id", "digest"),
    [
        ("dit", BASE, "0319a1cb19835fb510907dd3367c95ff"),
        ("dit", LAYERED, "8dc8cda05de16c73afa755e2c1ce2839"),
        ("vae", BASE, "ed4ea5824d55ec3107b09815e318123a"),
        ("vae", LAYERED, "44b39ddc499e027cfb24f7878d7416b9"),
        # In the names of transformers 4.
        ("text_encoder", BASE, "8004730443f55db63092006dd9f7110e"),
        (
            "blockwise_controlnet",
            f"{CONTROLNET}Depth",
            "073bce9cf969e317e5662cd570c3e79c",
        ),
        (
            "blockwise_controlnet",
            f"{CONTROLNET}Inpaint",
            "a9e54e480a628f0b956a688a81c33bab",
        ),
    ],
)
def test_a_published_layout_is_that_of_the_network(
    name: str, model_id: str, digest: str
) -> None:
    component = COMPONENTS[name]
    layout = component.formats[0] if name == "text_encoder" else NATIVE
    assert layout_digest(component, component.published[model_id], layout) == digest


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        ("dit", BASE),
        ("dit", LAYERED),
        ("blockwise_controlnet", f"{CONTROLNET}Canny"),
        ("blockwise_controlnet", f"{CONTROLNET}Inpaint"),
    ],
)
def test_a_network_is_told_by_its_weights(name: str, model_id: str) -> None:
    component = COMPONENTS[name]
    published = component.published[model_id]
    assert component.infer is not None
    told = component.infer(layout_shapes(component, published))
    assert settings(component, told) == settings(component, published)


@pytest.mark.parametrize(
    ("entry", "models"),
    [
        ("zero_cond_t", {"Qwen/Qwen-Image-Edit-2511"}),
        (
            "use_layer3d_rope",
            {LAYERED, "DiffSynth-Studio/Qwen-Image-Layered-Control"},
        ),
    ],
)
def test_a_published_configuration_has_what_is_its_own(
    entry: str, models: set[str]
) -> None:
    published = COMPONENTS["dit"].published
    assert {one for one in published if published[one].get(entry)} == models


def test_the_published_vae_is_the_librarys_default() -> None:
    vae = COMPONENTS["vae"]
    assert settings(vae, vae.published[BASE]) == settings(vae, {})


@pytest.mark.filterwarnings("default")
@named
def test_a_network_is_loaded_as_its_library_loads_it(name: str) -> None:
    pipe, folder = opened("qwen_image", "base"), toy("qwen_image", "base")
    ours = pipe.components[name]
    theirs = CLASSES[name].from_pretrained(folder / COMPONENTS[name].folder)
    assert not ours.training
    for one, other in (
        (ours.state_dict(), theirs.state_dict()),
        (dict(ours.named_buffers()), dict(theirs.named_buffers())),
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    known = pipe.configs[name]
    if name == "text_encoder":
        assert known.to_dict() == ours.config.to_dict()
    else:
        own = {k: one for k, one in ours.config.items() if not k.startswith("_")}
        assert vars(known) == own


def test_the_text_encoder_loads_from_published_and_from_new_names(
    tmp_path: Path,
) -> None:
    folder = toy("qwen_image", "base")
    own = opened("qwen_image", "base").components["text_encoder"].state_dict()
    save_file({k: one.clone() for k, one in own.items()}, tmp_path / "new.safetensors")
    config = (folder / "text_encoder/config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    assert own.keys() & weights_of("text_encoder").keys() == {"lm_head.weight"}
    file = ModelConfig(path=str(tmp_path / "new.safetensors"))
    again = Pipeline.from_pretrained(folder, [file], "base").components["text_encoder"]
    assert again.state_dict().keys() == own.keys()
    assert all(torch.equal(one, own[key]) for key, one in again.state_dict().items())


@pytest.mark.parametrize("name", ["text_encoder", "vae"])
def test_what_a_file_lacks_is_named_as_it_would_be_there(
    name: str, tmp_path: Path
) -> None:
    weights, folder = weights_of(name), toy("qwen_image", "base")
    lost = min(weights)
    weights["surplus.weight"] = weights.pop(lost)
    save_file(weights, tmp_path / "model.safetensors")
    config = (folder / name / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    file = ModelConfig(path=str(tmp_path / "model.safetensors"))
    with pytest.raises(StateError) as error:
        Pipeline.from_pretrained(folder, [file], "base")
    assert f": {lost}\n" in str(error.value)
    assert "surplus.weight" in str(error.value)
