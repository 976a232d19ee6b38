"""Published files are told by their places and by the names and shapes of their weights."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from dstrain import ModelConfig, Pipeline, StateError
from dstrain.models import components_of
from dstrain_qwen_image import MODEL
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from tests.support.layouts import PublishedFiles, settings
from tests.support.toys import opened, toy

COMPONENTS = components_of(MODEL)
BASE = "Qwen/Qwen-Image"
LAYERED = "Qwen/Qwen-Image-Layered"
BLOCKWISE = "blockwise_controlnet"
CONTROLNET = "DiffSynth-Studio/Qwen-Image-Blockwise-ControlNet-"


class TestPublishedFiles(PublishedFiles):
    family = MODEL
    files = (
        ("dit", BASE, None, "0319a1cb19835fb510907dd3367c95ff"),
        ("dit", LAYERED, None, "8dc8cda05de16c73afa755e2c1ce2839"),
        ("vae", BASE, None, "ed4ea5824d55ec3107b09815e318123a"),
        ("vae", LAYERED, None, "44b39ddc499e027cfb24f7878d7416b9"),
        # In the names of transformers 4.
        ("text_encoder", BASE, 0, "8004730443f55db63092006dd9f7110e"),
        (BLOCKWISE, f"{CONTROLNET}Depth", None, "073bce9cf969e317e5662cd570c3e79c"),
        (BLOCKWISE, f"{CONTROLNET}Inpaint", None, "a9e54e480a628f0b956a688a81c33bab"),
    )
    told = (
        ("dit", BASE),
        ("dit", LAYERED),
        (BLOCKWISE, f"{CONTROLNET}Canny"),
        (BLOCKWISE, f"{CONTROLNET}Inpaint"),
    )
    libraries = (
        ("base", "dit", QwenImageTransformer2DModel),
        ("base", "text_encoder", Qwen2_5_VLForConditionalGeneration),
        ("base", "vae", AutoencoderKLQwenImage),
    )


def weights_of(name: str) -> dict[str, torch.Tensor]:
    """Return the weights of a toy's component as its file has them."""
    weights = {}
    for path in (toy("qwen_image", "base") / name).glob("*.safetensors"):
        weights |= load_file(path)
    return weights


@pytest.mark.parametrize(
    ("entry", "models"),
    [
        ("zero_cond_t", {"Qwen/Qwen-Image-Edit-2511"}),
        ("use_layer3d_rope", {LAYERED, "DiffSynth-Studio/Qwen-Image-Layered-Control"}),
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
