"""Original and ComfyUI files of Z-Image load into the same networks as those of diffusers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from dstrain import ModelConfig, StateError
from dstrain.models import assign, components_of, recognize, to_checkpoint
from dstrain.plugin import Files
from dstrain_z_image import MODEL
from torch import Tensor

from tests.support.layouts import assert_equal, load_as, network_of_noise, saved
from tests.support.toys import toy

COMPONENTS = components_of(MODEL)
KNOWN = tuple(COMPONENTS.values())
(ORIGINAL,) = COMPONENTS["dit"].formats
ENCODER = "text_encoders.qwen3_4b.transformer."
State = Mapping[str, Tensor]


def make(name: str, variant: str = "base") -> Any:
    """Return a network whose weights differ from each other."""
    return network_of_noise(COMPONENTS[name], toy("z_image", variant))


def part_of(path: Path, weights: State, name: str) -> Files:
    """Save a file, in which this component alone is; return its part."""
    (((found,), part),) = recognize(Files((saved(path, weights),)), KNOWN)
    assert found is COMPONENTS[name]
    return part


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("prefix", ["", *COMPONENTS["dit"].prefixes])
@pytest.mark.parametrize("variant", ["base", "omni"])
def test_an_original_transformer_loads_as_the_network_that_it_was_made_from(
    variant: str, prefix: str, path: Path
) -> None:
    network = make("dit", variant)
    old = {**to_checkpoint(ORIGINAL, network.state_dict()), "norm_final.weight": ONE}
    assert "layers.0.attention.qkv.weight" in old
    weights = {f"{prefix}{key}": weight for key, weight in old.items()}
    part = part_of(path, weights, "dit")
    assert part.prefix == prefix
    loaded = load_as(COMPONENTS["dit"], part, network)
    assert_equal(loaded.state_dict(), network.state_dict())


ONE = torch.ones(1)


def test_the_transformers_names_are_those_that_diffusers_converts() -> None:
    network = make("dit")
    old = to_checkpoint(ORIGINAL, network.state_dict())
    convert = single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers
    assert_equal(convert(dict(old)), network.state_dict())


def test_one_file_of_comfyui_gives_every_component(path: Path) -> None:
    parts = (("dit", "model.diffusion_model.", ORIGINAL),)
    parts += (("vae", "vae.", COMPONENTS["vae"].formats[0]),)
    weights = {
        f"{prefix}{key}": weight
        for name, prefix, form in parts
        for key, weight in to_checkpoint(form, make(name).state_dict()).items()
    }
    encoder = dict(make("text_encoder").state_dict())
    del encoder["lm_head.weight"]
    weights |= {f"{ENCODER}{key}": weight for key, weight in encoder.items()}
    file = ModelConfig(path=str(saved(path, weights)))
    found = assign([file], KNOWN, ("dit", "vae", "text_encoder"))
    assert set(found) == {"dit", "vae", "text_encoder"}
    for name, files in found.items():
        network = make(name)
        loaded = load_as(COMPONENTS[name], files, network)
        assert_equal(loaded.state_dict(), network.state_dict())


def test_what_a_file_lacks_is_named_as_it_would_be_there(path: Path) -> None:
    network = make("dit")
    weights = to_checkpoint(ORIGINAL, network.state_dict())
    lost = "layers.1.attention.qkv.weight"
    weights["stranger.weight"] = weights.pop(lost)
    with pytest.raises(StateError) as error:
        load_as(COMPONENTS["dit"], part_of(path, weights, "dit"), network)
    assert f": {lost}\n" in str(error.value)
    assert "stranger.weight" in str(error.value)
