"""Components are recognized by their weights' names, configured without them, and
loaded strictly.
"""

import json
import multiprocessing.reduction
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from dstrain import StateError
from dstrain.models import recognize
from dstrain.plugin import Component, Files
from dstrain_qwen_image.components import COMPONENTS
from dstrain_qwen_image.controlnet import BlockwiseControlNet
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

BY_NAME = {component.name: component for component in COMPONENTS}
NETWORKS = [component for component in COMPONENTS if not component.is_folder]
CLASSES = {
    "dit": QwenImageTransformer2DModel,
    "text_encoder": Qwen2_5_VLForConditionalGeneration,
    "vae": AutoencoderKLQwenImage,
    "blockwise_controlnet": BlockwiseControlNet,
}
named = pytest.mark.parametrize(
    "component", NETWORKS, ids=lambda component: component.name
)


@pytest.fixture(scope="module")
def toy_folder(toy_of: Callable[[str], Path]) -> Path:
    """The toy of a variant that has every network."""
    return toy_of("blockwise-controlnet")


def files_of(folder: Path, component: Component) -> Files:
    return arranged(
        component, *sorted((folder / component.folders[0]).glob("*.safetensors"))
    )


def arranged(component: Component, *paths: Path) -> Files:
    return recognize(Files(paths), (component,))[0][1]


def configuration_of(folder: Path, component: Component) -> Any:
    return component.configure(
        json.loads((folder / component.folders[0] / "config.json").read_text())
    )


def assert_equal_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@named
def test_marks_recognize_this_component_and_no_other(
    component: Component, toy_folder: Path
) -> None:
    ((fitting, _),) = recognize(Files(files_of(toy_folder, component).paths), NETWORKS)
    assert fitting == (component,)


@pytest.mark.filterwarnings("default")
@named
def test_loads_the_weights_that_the_library_loads(
    component: Component, toy_folder: Path
) -> None:
    ours = component.network.load(
        files_of(toy_folder, component),
        configuration_of(toy_folder, component),
        torch.float32,
    )
    theirs = CLASSES[component.name].from_pretrained(toy_folder / component.folders[0])
    assert_equal_weights(ours, theirs)
    assert not ours.training
    buffers = dict(theirs.named_buffers())
    assert all(
        torch.equal(buffer, buffers[name]) for name, buffer in ours.named_buffers()
    )


@named
def test_weights_stored_in_another_dtype_load_as_the_dtype_asked_for(
    component: Component, toy_folder: Path, tmp_path: Path
) -> None:
    paths = []
    for path in files_of(toy_folder, component).paths:
        paths.append(tmp_path / path.name)
        save_file(
            {name: weight.half() for name, weight in load_file(path).items()}, paths[-1]
        )
    for dtype in (torch.float32, torch.bfloat16):
        module = component.network.load(
            arranged(component, *paths), configuration_of(toy_folder, component), dtype
        )
        assert {weight.dtype for weight in module.parameters()} == {dtype}


@named
def test_a_missing_weight_is_refused_by_name(
    component: Component, toy_folder: Path, tmp_path: Path
) -> None:
    paths = files_of(toy_folder, component).paths
    weights = {
        name: tensor for path in paths for name, tensor in load_file(path).items()
    }
    dropped = min(weights)
    save_file(
        {"surplus.weight": weights.pop(dropped), **weights},
        tmp_path / "model.safetensors",
    )
    files = arranged(component, tmp_path / "model.safetensors")
    with pytest.raises(StateError) as error:
        component.network.load(
            files, configuration_of(toy_folder, component), torch.float32
        )
    assert f"1 missing: {dropped}" in str(error.value)
    assert "1 unexpected: surplus.weight" in str(error.value)


def test_the_text_encoder_loads_from_published_and_from_new_names(
    toy_folder: Path, tmp_path: Path
) -> None:
    component = BY_NAME["text_encoder"]
    configuration = configuration_of(toy_folder, component)
    published = component.network.load(
        files_of(toy_folder, component), configuration, torch.float32
    )
    own_names = {
        name: tensor.clone() for name, tensor in published.state_dict().items()
    }
    save_file(own_names, tmp_path / "model.safetensors")
    assert set(load_file(*files_of(toy_folder, component).paths)) & set(own_names) == {
        "lm_head.weight"
    }
    renamed = component.network.load(
        arranged(component, tmp_path / "model.safetensors"),
        configuration,
        torch.float32,
    )
    assert_equal_weights(published, renamed)


@pytest.mark.parametrize("name", ["dit", "vae"])
def test_the_configuration_without_weights_equals_the_modules_own(
    name: str, toy_folder: Path, loaded: dict[str, Any]
) -> None:
    own = {
        key: value
        for key, value in loaded[name].config.items()
        if not key.startswith("_")
    }
    assert vars(configuration_of(toy_folder, BY_NAME[name])) == own
    assert (
        vars(
            BY_NAME[name].configure({"_class_name": "X", "pooled_projection_dim": 768})
        ).keys()
        == own.keys()
    )


def test_the_text_encoders_configuration_equals_the_modules_own(
    toy_folder: Path, loaded: dict[str, Any]
) -> None:
    assert (
        configuration_of(toy_folder, BY_NAME["text_encoder"]).to_dict()
        == loaded["text_encoder"].config.to_dict()
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("dit", 20_430_401_088), ("text_encoder", 8_292_166_656), ("vae", 126_892_531)],
)
def test_the_published_configuration_builds_a_network_of_the_published_size(
    name: str, parameters: int
) -> None:
    configuration = BY_NAME[name].configure(BY_NAME[name].published["Qwen/Qwen-Image"])
    with init_empty_weights(include_buffers=False):
        module = (
            CLASSES[name](configuration)
            if name == "text_encoder"
            else CLASSES[name](**vars(configuration))
        )
    assert sum(weight.numel() for weight in module.parameters()) == parameters


def test_the_published_vae_configuration_is_the_librarys_default() -> None:
    defaults = vars(BY_NAME["vae"].configure({}))
    assert json.dumps(
        vars(BY_NAME["vae"].configure(BY_NAME["vae"].published["Qwen/Qwen-Image"]))
    ) == json.dumps(defaults)


def test_the_tokenizer_loads_from_its_folder(
    toy_folder: Path, loaded: dict[str, Any]
) -> None:
    text = "a red apple<|im_end|>"
    assert (
        loaded["tokenizer"](text).input_ids
        == Qwen2Tokenizer.from_pretrained(toy_folder / "tokenizer")(text).input_ids
    )


def test_loaders_can_be_sent_to_another_process() -> None:
    for component in COMPONENTS:
        sent = multiprocessing.reduction.ForkingPickler.dumps(component.network)
        assert type(component.network).__name__.encode() in bytes(sent)
