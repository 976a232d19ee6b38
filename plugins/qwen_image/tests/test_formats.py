"""ComfyUI's files of Qwen-Image load into the same networks as those of diffusers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from dstrain import ModelConfig, Pipeline
from dstrain.cli.main import main
from dstrain.models import components_of, find, recognize, to_checkpoint
from dstrain.pipeline import choose_variant
from dstrain.plugin import Files
from dstrain_qwen_image import MODEL
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.layouts import assert_equal
from tests.support.toys import toy

COMPONENTS = components_of(MODEL)


def weights_in(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
def test_the_vae_in_the_names_of_wan_is_the_one_that_it_was(
    prefix: str, tmp_path: Path
) -> None:
    """qwen_image_vae.safetensors; diffusers' converter of Wan's VAE reads it alike."""
    folder = toy("qwen_image", "base")
    state = weights_in(folder / "vae")
    (comfyui,) = COMPONENTS["vae"].formats
    old = to_checkpoint(comfyui, state)
    names = {"conv1.weight", "decoder.middle.0.residual.0.gamma", "encoder.head.2.bias"}
    assert names <= old.keys()
    path = tmp_path / "qwen_image_vae.safetensors"
    save_file({prefix + name: weight for name, weight in old.items()}, path)
    (((found,), files),) = recognize(Files((path,)), list(COMPONENTS.values()))
    assert found is COMPONENTS["vae"]
    config = json.loads((folder / "vae/config.json").read_bytes())
    loaded: Any = found.network.load(files, found.configure(config), torch.float32)
    assert_equal(loaded.state_dict(), state)
    assert_equal(single_file_utils.convert_wan_vae_to_diffusers(dict(old)), state)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_the_mark_of_edit_2511_says_zero_cond_t(prefix: str, tmp_path: Path) -> None:
    """comfy/model_detection.py: it is a key without numbers. A config.json that is an
    earlier model's does not overrule it.
    """
    folder = toy("qwen_image", "edit-2511")
    state = weights_in(folder / "transformer")
    config = json.loads((folder / "transformer/config.json").read_bytes())
    assert config.pop("zero_cond_t") is True
    (tmp_path / "config.json").write_text(json.dumps(config))
    mark = {"__index_timestep_zero__": torch.tensor([])}
    for name, tensors, is_told in (("marked", state | mark, True), ("no", state, None)):
        path = tmp_path / f"{name}.safetensors"
        save_file({prefix + key: one for key, one in tensors.items()}, path)
        models = (ModelConfig(path=str(path)),)
        known = find(MODEL, models, ("dit",)).configs["dit"]
        assert known.get("zero_cond_t") is is_told
        dit = Pipeline.from_pretrained(folder, models, "edit-2511").components["dit"]
        assert_equal(dit.state_dict(), state)
        assert dit.zero_cond_t is bool(is_told)
    marked = (ModelConfig(path=str(tmp_path / "marked.safetensors")),)
    assert choose_variant(MODEL, None, marked) == "edit-2511"


@pytest.mark.parametrize(
    ("variant", "is_marked"), [("edit-2511", True), ("edit-2509", False)]
)
def test_what_is_written_for_comfyui_has_the_mark_again(
    variant: str, is_marked: bool, tmp_path: Path
) -> None:
    folder = toy("qwen_image", variant) / "transformer"
    config = (folder / "config.json").read_text()
    header = {"family": "qwen_image", "component": "dit", "config": config}
    files = [tmp_path / f"{name}.safetensors" for name in ("ours", "comfyui", "again")]
    save_file(weights_in(folder), files[0], header)
    for number, program in enumerate(("comfyui", "diffusers")):
        paths = [str(files[number]), str(files[number + 1])]
        assert main(["export", "--format", program, *paths]) == 0
    written = load_file(files[1])
    assert ("__index_timestep_zero__" in written) is is_marked
    assert_equal(load_file(files[2]), weights_in(folder))
