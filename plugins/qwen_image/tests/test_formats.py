"""ComfyUI's files of Qwen-Image load into the same networks as those of diffusers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from diffusers.loaders import single_file_utils
from dstrain import ModelConfig
from dstrain.lora.export import export
from dstrain.models import find, recognize, to_checkpoint
from dstrain.pipeline import choose_variant
from dstrain.plugin import Files
from dstrain_qwen_image import MODEL
from dstrain_qwen_image.components import COMPONENTS
from safetensors.torch import load_file, save_file
from torch import Tensor

BY_NAME = {component.name: component for component in COMPONENTS}


def weights_in(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
def test_the_vae_in_the_names_of_wan_is_the_one_that_it_was(
    prefix: str, toy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """qwen_image_vae.safetensors; diffusers' converter of Wan's VAE reads it alike."""
    folder = toy_of("base") / "vae"
    state = weights_in(folder)
    (comfyui,) = BY_NAME["vae"].formats
    old = to_checkpoint(comfyui, state)
    names = {"conv1.weight", "decoder.middle.0.residual.0.gamma", "encoder.head.2.bias"}
    assert names <= old.keys()
    path = tmp_path / "qwen_image_vae.safetensors"
    save_file({prefix + name: weight for name, weight in old.items()}, path)
    (((found,), files),) = recognize(Files((path,)), COMPONENTS)
    assert found.name == "vae"
    config = json.loads((folder / "config.json").read_bytes())
    loaded = found.network.load(files, found.configure(config), torch.float32)
    assert_equal(loaded.state_dict(), state)
    theirs = single_file_utils.convert_wan_vae_to_diffusers(dict(old))
    assert_equal(theirs, state)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_the_mark_of_edit_2511_says_zero_cond_t(
    prefix: str, toy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """comfy/model_detection.py: it is a key without numbers. A config.json that is an
    earlier model's does not overrule it.
    """
    folder = toy_of("edit-2511") / "transformer"
    state = weights_in(folder)
    config = json.loads((folder / "config.json").read_bytes())
    assert config.pop("zero_cond_t") is True
    (tmp_path / "config.json").write_text(json.dumps(config))
    mark = {"__index_timestep_zero__": torch.tensor([])}
    said = {}
    for name, tensors in (("marked", state | mark), ("plain", state)):
        path = tmp_path / f"{name}.safetensors"
        save_file({prefix + key: one for key, one in tensors.items()}, path)
        models = (ModelConfig(path=str(path)),)
        known = find(MODEL, models, ("dit",)).configs["dit"]
        said[name] = known.get("zero_cond_t")
        (((found,), files),) = recognize(Files((path,)), COMPONENTS)
        loaded = found.network.load(files, found.configure(known), torch.float32)
        assert_equal(loaded.state_dict(), state)
        assert loaded.zero_cond_t is (name == "marked")
    assert said == {"marked": True, "plain": None}
    marked = (ModelConfig(path=str(tmp_path / "marked.safetensors")),)
    assert choose_variant(MODEL, None, marked) == "edit-2511"


def test_what_is_written_for_comfyui_has_the_mark_again(
    toy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    for variant, marked in (("edit-2511", True), ("edit-2509", False)):
        folder = toy_of(variant) / "transformer"
        config = (folder / "config.json").read_text()
        header = {"family": "qwen_image", "component": "dit", "config": config}
        source = tmp_path / f"{variant}.safetensors"
        save_file(weights_in(folder), source, header)
        output = tmp_path / f"{variant}-comfyui.safetensors"
        export(source, output, "comfyui")
        written = load_file(output)
        assert ("__index_timestep_zero__" in written) is marked
        again = tmp_path / f"{variant}-again.safetensors"
        export(output, again, "diffusers")
        assert_equal(load_file(again), weights_in(folder))
