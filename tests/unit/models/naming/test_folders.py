"""The components in a folder are found by their places, or by the keys in their files."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from dstrain import ModelConfig, UsageError
from dstrain.errors import MissingFiles
from dstrain.models.naming import weight_sets
from dstrain.models.naming.folders import parts_of_folder, refuse_doubt
from dstrain.plugin import Component
from safetensors.torch import load_file, save_file

from tests.support.family import COMPONENTS, FOLDERS, MARKS, weights_of, write


def merged(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Component -> all its weights."""
    return {
        name: {key: one for path in paths for key, one in load_file(path).items()}
        for name, paths in weights_of(folder).items()
    }


@pytest.fixture
def comfy(tmp_path: Path) -> Path:
    """A folder as ComfyUI has it, with files of another model."""
    write(tmp_path / "model")
    weights = merged(tmp_path / "model")
    folder = tmp_path / "comfy"
    places = {
        "dit": "diffusion_models/some/tiny.safetensors",
        "text_encoder": "text_encoders/tiny_encoder.safetensors",
        "vae": "vae/tiny_vae.safetensors",
    }
    for name, place in places.items():
        (folder / place).parent.mkdir(parents=True)
        save_file(weights[name], folder / place)
    save_file({"conv.weight": torch.zeros(1)}, folder / "vae/another.safetensors")
    (folder / "vae/put_vae_here").touch()
    return folder


def found(
    folder: Path, components: Sequence[Component] = COMPONENTS
) -> dict[str, ModelConfig]:
    parts = parts_of_folder(folder, components)
    return {" or ".join(part.components): part.config for part in parts}


def test_a_published_layout_is_read_by_its_places(tmp_path: Path) -> None:
    write(tmp_path / "model")
    (tmp_path / "model/vae/model-1-of-1.safetensors").write_bytes(b"not read")
    expected = weights_of(tmp_path / "model")
    configs = found(tmp_path / "model")
    assert {name: list(one.path or ()) for name, one in configs.items()} == expected
    assert list(configs) == list(FOLDERS)


def test_parts_in_the_folders_of_comfyui_are_recognized_by_their_keys(
    comfy: Path,
) -> None:
    configs = found(comfy)
    assert configs["dit"].path == (
        str(comfy / "diffusion_models/some/tiny.safetensors"),
    )
    assert set(configs) == {"dit", "text_encoder", "vae"}


def test_files_beside_each_other_are_recognized_too(
    comfy: Path, tmp_path: Path
) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in comfy.rglob("*.safetensors"):
        shutil.copy(path, flat)
    assert set(found(flat)) == {"dit", "text_encoder", "vae"}
    # What has its place in a published layout is looked for nowhere else.
    shutil.copytree(tmp_path / "model/vae", flat / "vae")
    assert found(flat)["vae"].path == (str(flat / "vae/model-1-of-1.safetensors"),)


def test_several_files_for_one_component_are_refused_by_name(comfy: Path) -> None:
    first = comfy / "vae/tiny_vae.safetensors"
    second = comfy / "vae/zz.safetensors"
    shutil.copy(first, second)
    with pytest.raises(UsageError, match="has several files that can be vae") as caught:
        refuse_doubt(parts_of_folder(comfy, COMPONENTS))
    assert f"{first}, {second}" in caught.value.what
    assert f"""--model_paths '["{first}"]'""" in caught.value.help_lines[0]


def test_a_file_name_tells_components_with_the_same_keys_apart(comfy: Path) -> None:
    def expert(name: str, mark: str) -> Component:
        return Component(
            name,
            network=COMPONENTS[0].network,
            folder=name,
            key_patterns=MARKS["dit"],
            expert_filenames=(mark,),
        )

    experts = (expert("dit", "*high*noise*"), expert("dit2", "*low*noise*"))
    place = comfy / "diffusion_models"
    file = place / "some/tiny.safetensors"
    assert found(comfy, experts) == {"dit or dit2": ModelConfig((str(file),))}
    shutil.copy(file, place / "Tiny_Low_Noise_14B.safetensors")
    file.rename(place / "tiny_high_noise_14B.safetensors")
    configs = found(comfy, experts)
    assert configs["dit"].path == (str(place / "tiny_high_noise_14B.safetensors"),)
    assert configs["dit2"].path == (str(place / "Tiny_Low_Noise_14B.safetensors"),)
    assert configs["dit2"].component == "dit2"
    refuse_doubt(parts_of_folder(comfy, experts))


def test_absent_shards_and_a_folder_of_nothing_are_named(tmp_path: Path) -> None:
    write(tmp_path / "model")
    (tmp_path / "model/transformer/model-2-of-2.safetensors").unlink()
    with pytest.raises(MissingFiles, match="1 shard is missing, such as model-2-of-2"):
        found(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        MissingFiles, match="contains no files of dit, text_encoder, vae"
    ):
        found(tmp_path / "empty")


def test_shards_are_together_and_models_are_not() -> None:
    names = ["b-1-of-2.st", "a.st", "b-2-of-2.st", "c-00001-of-00001.st"]
    sets = weight_sets(map(Path, names))
    assert [[path.name for path in one] for one in sets] == [
        ["a.st"],
        ["b-1-of-2.st", "b-2-of-2.st"],
        ["c-00001-of-00001.st"],
    ]
