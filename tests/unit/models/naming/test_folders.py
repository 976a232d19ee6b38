"""The components in a folder are found by their places, or by the keys in their files."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dstrain import TrainConfig, UsageError
from dstrain.errors import MissingFiles
from dstrain.models.naming import model_configs, parts_of
from dstrain.plugin import Component, ModelFamily
from safetensors.torch import load_file, save_file

from tests.support.family import COMPONENTS, FOLDERS, MODEL, weights_of

PLACES = {
    "dit": "diffusion_models/some/tiny.safetensors",
    "text_encoder": "text_encoders/tiny_encoder.safetensors",
    "vae": "vae/tiny_vae.safetensors",
}


def expert(name: str, mark: str) -> Component:
    return replace(COMPONENTS[0], name=name, folder=name, expert_filenames=(mark,))


EXPERTS = (expert("dit", "*high*noise*"), expert("dit2", "*low*noise*"))
OF_EXPERTS = replace(MODEL, components=f"{__name__}:EXPERTS")
TWO_PLACES = tuple(replace(one, other_folders=("clip",)) for one in COMPONENTS)
OF_TWO_PLACES = replace(MODEL, components=f"{__name__}:TWO_PLACES")


@pytest.fixture
def comfy(model: Path, tmp_path: Path) -> Path:
    """A folder as ComfyUI has it, with files of another model."""
    folder = tmp_path / "comfy"
    for name, paths in weights_of(model).items():
        place = folder / PLACES[name]
        place.parent.mkdir(parents=True)
        weights = {key: one for path in paths for key, one in load_file(path).items()}
        save_file(weights, place)
    save_file({"conv.weight": torch.zeros(1)}, folder / "vae/another.safetensors")
    (folder / "vae/put_vae_here").touch()
    return folder


def found(folder: Path, family: ModelFamily = MODEL) -> dict[str, list[str]]:
    """Component -> its files; "or" where the keys do not tell."""
    parts = parts_of(str(folder), family, None)
    return {
        " or ".join(part.components): list(part.config.path or ()) for part in parts
    }


def chosen(folder: Path, family: ModelFamily = MODEL) -> list[str]:
    """The components that the files of a run are said to be."""
    config = TrainConfig(model="tiny", model_id=str(folder))
    return [one.component for one in model_configs(config, family, offline=True)]


def test_a_published_layout_is_read_by_its_places(model: Path) -> None:
    (model / "vae/model-1-of-1.safetensors").write_bytes(b"not read")
    assert found(model) == weights_of(model)
    assert list(found(model)) == list(FOLDERS)
    # Also where one is named as a folder of ComfyUI; that of diffusers comes first.
    shutil.copytree(model / "text_encoder", model / "clip")
    assert found(model, OF_TWO_PLACES) == weights_of(model)


def test_parts_in_the_folders_of_comfyui_or_beside_each_other_are_told_by_their_keys(
    comfy: Path, model: Path, tmp_path: Path
) -> None:
    assert found(comfy) == {name: [str(comfy / one)] for name, one in PLACES.items()}
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in comfy.rglob("*.safetensors"):
        shutil.copy(path, flat)
    assert set(found(flat)) == set(PLACES)
    # What has its place in a published layout is looked for nowhere else.
    shutil.copytree(model / "vae", flat / "vae")
    assert found(flat)["vae"] == [str(flat / "vae/model-1-of-1.safetensors")]


def test_several_files_for_one_component_are_refused_by_name(comfy: Path) -> None:
    first, second = comfy / PLACES["vae"], comfy / "vae/zz.safetensors"
    shutil.copy(first, second)
    with pytest.raises(
        UsageError, match=f"--model_id: .*vae: {first}, {second}"
    ) as one:
        chosen(comfy)
    assert f"""--model_paths '["{first}"]'""" in one.value.help_lines[0]
    # Also where each is in one file with another component.
    for name in ("dit", "text_encoder"):
        save_file(
            load_file(comfy / PLACES[name]) | load_file(first), comfy / PLACES[name]
        )
    first.unlink()
    second.unlink()
    with pytest.raises(UsageError, match=r"--model_id: .*vae: "):
        chosen(comfy)


def test_a_file_name_tells_components_with_the_same_keys_apart(comfy: Path) -> None:
    file = comfy / PLACES["dit"]
    assert found(comfy, OF_EXPERTS) == {"dit or dit2": [str(file)]}
    high = file.with_name("tiny_high_noise_14B.safetensors")
    low = file.with_name("Tiny_Low_Noise_14B.safetensors")
    both = file.with_name("tiny_high_low_noise.safetensors")
    file.rename(both)
    assert found(comfy, OF_EXPERTS) == {"dit or dit2": [str(both)]}
    both.rename(file)
    shutil.copy(file, low)
    file.rename(high)
    assert found(comfy, OF_EXPERTS) == {"dit": [str(high)], "dit2": [str(low)]}
    assert sorted(chosen(comfy, OF_EXPERTS)) == ["dit", "dit2"]


def test_absent_shards_and_no_parts_are_named(model: Path, tmp_path: Path) -> None:
    (model / "transformer/model-2-of-2.safetensors").unlink()
    with pytest.raises(MissingFiles, match=r" 1 shard .* model-2-of-2\.safetensors"):
        found(model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingFiles, match=r"empty: .* dit, text_encoder, vae"):
        found(tmp_path / "empty")
