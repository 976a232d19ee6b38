"""Components are configured without their weights, and loaded as their libraries load
them.
"""

import json
import multiprocessing.reduction
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, FluxTransformer2DModel
from dstrain import ModelConfig
from dstrain.models import component_at, recognize
from dstrain.models.configs import infer_config
from dstrain.models.formats import shapes_of
from dstrain.models.weights import Weights
from dstrain.plugin import Component, Files
from dstrain_flux import TRANSFORMERS
from dstrain_flux.components import COMPONENTS
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, T5EncoderModel

BY_NAME = {component.name: component for component in COMPONENTS}
CLASSES = {
    "dit": FluxTransformer2DModel,
    "text_encoder_1": CLIPTextModel,
    "text_encoder_2": T5EncoderModel,
    "vae": AutoencoderKL,
}
SIZES = {
    "dit": 11_901_408_320,
    "text_encoder_1": 123_060_480,
    "text_encoder_2": 4_762_310_656,
    "vae": 83_819_683,
}
"""Parameters of black-forest-labs/FLUX.1-dev's networks."""
named = pytest.mark.parametrize("name", CLASSES)


def configured(folder: Path, component: Component) -> Any:
    return component.configure(
        json.loads((folder / component.folders[0] / "config.json").read_text())
    )


def empty(name: str, configuration: Any) -> torch.nn.Module:
    with init_empty_weights(include_buffers=False):
        if name.startswith("text_encoder"):
            return CLASSES[name](configuration)
        return CLASSES[name](**vars(configuration))


@pytest.mark.filterwarnings("default")
@named
def test_loads_the_weights_that_the_library_loads(
    name: str, toy_folder: Path, loaded: dict[str, Any]
) -> None:
    theirs = CLASSES[name].from_pretrained(toy_folder / BY_NAME[name].folders[0])
    ours = loaded[name]
    assert not ours.training
    assert type(ours) is type(theirs)
    first, second = ours.state_dict(), theirs.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert (
        dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    ), "tied weights are one"
    buffers = dict(theirs.named_buffers())
    assert all(
        torch.equal(buffer, buffers[key]) for key, buffer in ours.named_buffers()
    )


@named
def test_the_configuration_without_weights_equals_the_modules_own(
    name: str, toy_folder: Path, loaded: dict[str, Any]
) -> None:
    found = configured(toy_folder, BY_NAME[name])
    if name.startswith("text_encoder"):
        assert found.to_dict() == loaded[name].config.to_dict() | {
            "dtype": found.to_dict()["dtype"]
        }
    else:
        assert vars(found) == {
            key: value
            for key, value in loaded[name].config.items()
            if not key.startswith("_")
        }


@named
def test_the_published_configuration_builds_a_network_of_the_published_size(
    name: str,
) -> None:
    component = BY_NAME[name]
    module = empty(
        name, component.configure(component.published["black-forest-labs/FLUX.1-dev"])
    )
    tied = getattr(module, "all_tied_weights_keys", {})
    assert (
        sum(
            weight.numel()
            for key, weight in module.named_parameters()
            if key not in tied
        )
        == SIZES[name]
    )
    assert set(component.published) == set(TRANSFORMERS)


@named
def test_the_published_configuration_is_found_from_the_published_shapes(
    name: str,
) -> None:
    component = BY_NAME[name]
    published = component.published["black-forest-labs/FLUX.1-dev"]
    weights = empty(name, component.configure(published)).state_dict()
    assert infer_config(component, shapes_of(weights)) == published


@named
def test_shapes_of_another_size_are_not_taken_for_the_published_ones(
    name: str, loaded: dict[str, Any]
) -> None:
    shapes = shapes_of(loaded[name].state_dict())
    assert infer_config(BY_NAME[name], shapes) is None


def test_schnell_gets_no_guidance_and_other_sizes_are_inferred() -> None:
    component = BY_NAME["dit"]
    published = component.published["black-forest-labs/FLUX.1-schnell"]
    assert published["guidance_embeds"] is False
    small = {
        **published,
        "num_layers": 2,
        "num_single_layers": 3,
        "num_attention_heads": 4,
        "in_channels": 96,
    }
    weights = empty(
        "dit", component.configure({**small, "out_channels": 64})
    ).state_dict()
    found = component.infer(
        {key: tuple(weight.shape) for key, weight in weights.items()}
    )
    assert found == {**small, "out_channels": 64}


@pytest.mark.parametrize("kept", ["shared.weight", "encoder.embed_tokens.weight"])
def test_t5_is_loaded_from_either_name_of_its_embedding(
    kept: str, toy_folder: Path, tmp_path: Path, loaded: dict[str, Any]
) -> None:
    weights: dict[str, Any] = {}
    for path in (toy_folder / "text_encoder_2").glob("*.safetensors"):
        weights |= load_file(path)
    embedding = weights.pop("shared.weight")
    save_file({**weights, kept: embedding}, tmp_path / "t5.safetensors")
    component = BY_NAME["text_encoder_2"]
    (((found,), files),) = recognize(Files((tmp_path / "t5.safetensors",)), COMPONENTS)
    assert found is component
    assert len(Weights.of(files).parts) == len(weights) + 1
    module = component.network.load(
        files, configured(toy_folder, component), torch.float32
    )
    assert module.shared.weight is module.encoder.embed_tokens.weight
    assert torch.equal(module.shared.weight, loaded["text_encoder_2"].shared.weight)


def test_loaders_can_be_sent_to_another_process() -> None:
    for component in COMPONENTS:
        multiprocessing.reduction.ForkingPickler.dumps(component.network)


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
def test_published_files_are_recognized_by_their_place_so_that_a_stage_fetches_only_its_own(
    pattern: str, name: str
) -> None:
    assert (
        component_at(ModelConfig(None, "black-forest-labs/Any", pattern), COMPONENTS)
        == name
    )
