"""A dry run counts the largest sample of a run at its true shapes, without memory, and
says what it cannot know.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.plugin import Column
from PIL import Image
from safetensors.torch import save_file

from tests.support import family
from tests.support.family import IDS
from tests.support.runs import project, train

pytestmark = pytest.mark.usefixtures("tiny")
DryRun = Callable[..., Any]


def test_a_component_without_configuration_is_named_and_nothing_is_said_to_fit(
    here: Path, dry_run: DryRun
) -> None:
    found = dry_run(here, variant="base", model_paths='["no.safetensors"]')
    assert re.search(r"\n    dit +not known  ", found.page)
    assert "dit" not in found.memory
    assert found.fits is None
    assert found.disk == {}


def test_a_unit_that_needs_numbers_makes_it_unknown_with_the_reason(
    here: Path, dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode_prompt(
        prompt: str, *, text_encoder: Any, tokenizer: Any
    ) -> family.Prompt:
        raise RuntimeError("needs numbers\nand more")

    spec = replace(family.BASE, units=(encode_prompt, family.encode_image))
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    found = dry_run(here, variant="base")
    reason = r"RuntimeError\('needs numbers\\nand more'\)"
    assert re.search(rf"activations +not known  {reason}\n", found.page)
    assert re.search(r"peak +more than [\d.]+ GiB", found.page)
    assert found.fits is None
    small = dry_run(here, variant="base", device_memory="1023MiB")
    assert small.fits is False


def test_files_that_are_not_here_are_downloads(
    here: Path, tmp_path: Path, dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", str(tmp_path))
    flags = {"variant": "base", "model_paths": None}
    found = dry_run(here, model_id_with_origin_paths=IDS, **flags)
    # The configurations of the others are not known.
    (count,) = re.findall(r"\bdit .* (\d+) parameters", found.page)
    # In bf16.
    assert int(count) == sum(one.numel() for one in family.Dit(8, 2).parameters())
    assert found.disk["downloads"] == pytest.approx(2 * int(count), rel=0.05)
    toy = dry_run(here, toy=True, **flags).disk
    assert "downloads" not in toy
    both = toy["in all"] + found.disk["downloads"]
    assert found.disk["in all"] == pytest.approx(both, abs=200)
    cache = {"feature_cache": tmp_path / "cache"}
    page = dry_run(here, model_id_with_origin_paths=IDS, **cache, **flags).page
    # Each stage has its own.
    assert re.findall(r"    (\w+) +not known  its ", page) == ["text_encoder", "vae"]


def dataset_of(here: Path, folder: Path, row: int, image: str) -> Path:
    """A dataset of one row, which has this image."""
    rows = json.loads((here / "data/metadata.json").read_text())
    folder.mkdir()
    shutil.copy(here / "data" / image, folder)
    only = {**rows[row], "image": image}
    (folder / "metadata.json").write_text(json.dumps([only]))
    return folder


def test_the_sample_that_is_counted_is_the_largest_with_the_longest_prompt(
    here: Path, tmp_path: Path, dry_run: DryRun
) -> None:
    only = dataset_of(here, tmp_path / "data", 2, "1.png")
    found = dry_run(here)
    assert found.memory == dry_run(here, dataset_base_path=only).memory
    place = found.page.partition("largest sample, ")[2].partition(",")[0]
    assert place in {f"metadata.json:{row}" for row in (2, 4, 6)}


def test_of_several_images_each_has_its_own_size(
    tmp_path: Path, dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode_last(
        input_image: list[Image.Image], *, vae: Any, dtype: torch.dtype
    ) -> family.Latents:
        return family.encode_image(input_image[-1], vae=vae, dtype=dtype)

    several = {"input_image": Column("image", "images", multiple=8)}
    inputs = {**family.BASE.inputs, **several}
    units = (family.encode_prompt, encode_last)
    spec = replace(family.BASE, units=units, inputs=inputs)
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    project(tmp_path)
    Image.new("RGB", (512, 512)).save(tmp_path / "data/1.png")
    row = {"image": ["0.png", "1.png"], "prompt": "a dog"}
    (tmp_path / "data/metadata.json").write_text(json.dumps([row]))
    assert dry_run(tmp_path, variant="base").memory["activations"] > 2**20


def test_of_a_feature_cache_it_is_the_largest_that_is_stored(
    here: Path, tmp_path: Path, dry_run: DryRun
) -> None:
    some, only = tmp_path / "some", dataset_of(here, tmp_path / "data", 2, "2.png")
    shutil.copytree(here / "data", some)
    (some / "0.png").write_bytes(b"no image")
    skip = {"on_bad_sample": "skip"}
    found = []
    for number, data in enumerate((some, only)):
        cache = {
            "feature_cache": tmp_path / str(number),
            "dataset_base_path": data,
        } | skip
        train(here, task="sft:data_process", **cache)
        found.append(dry_run(here, task="sft:train", **cache))
    assert found[0].memory == found[1].memory
    # Those of its size, and one of the other.
    assert re.findall(r"largest of (\d) samples", found[0].page) == ["3"]


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ({"height": 32, "width": 64}, "64 x 32"),
        ({"max_pixels": 1000}, "24 x 24"),
        ({"resolution": "768,512"}, "768 x 768"),
        ({}, "1024 x 1024"),
    ],
)
def test_without_a_dataset_it_has_the_size_of_the_flags(
    flags: dict[str, Any], size: str, here: Path, dry_run: DryRun
) -> None:
    found = dry_run(here, dataset_base_path=None, **flags)
    assert f" {size} " in found.page
    assert found.fits


def test_what_units_hold_at_once_is_followed(
    here: Path, dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1, 2 and 4 MiB, made of weights, the first is gone before the last is made."""

    def encode_image(
        input_image: Image.Image, *, vae: Any, dtype: torch.dtype
    ) -> family.Latents:
        first = vae.encoder.weight.sum() * torch.ones(2**18)
        second = first.double()
        del first
        third = torch.cat([second, second])
        kept = third[:1].float() * 0
        del second, third
        latents = family.encode_image(input_image, vae=vae, dtype=dtype)
        return {"input_latents": latents["input_latents"] + kept}

    spec = replace(family.BASE, units=(family.encode_prompt, encode_image))
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    cache = {"feature_cache": here / "cache", "variant": "base"}
    found = dry_run(here, task="sft:data_process", **cache)
    assert found.memory["encoding"] == pytest.approx(6 * 2**20, rel=0.02)
    # Training holds none of them.
    stage_2 = dry_run(here, task="sft:train", height=16, width=16, **cache)
    assert stage_2.memory["activations"] < 2**20


def test_tensors_are_as_large_as_their_files_say_and_unknown_without_a_dataset(
    tmp_path: Path, dry_run: DryRun
) -> None:
    project(tmp_path)
    path = tmp_path / "data/metadata.json"
    rows = json.loads(path.read_text())
    sizes = []
    for count in (1, 5):
        tensors = {
            "latents": torch.ones(1, count + 1, 4, 64, 64),
            "sigmas": torch.ones(1, count + 1),
        }
        save_file(tensors, tmp_path / "data/taught.safetensors")
        row = {"trajectory": "taught.safetensors", "num_inference_steps": count}
        path.write_text(json.dumps([{**rows[0], **row}]))
        found = dry_run(tmp_path, task="trajectory_imitation")
        sizes.append(found.memory["activations"])
    assert sizes[1] > 2 * sizes[0]
    page = dry_run(tmp_path, task="trajectory_imitation", dataset_base_path=None).page
    words = " ".join(page.split())
    assert re.search("activations not known .* trajectory_imitation ", words)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("flux", "controlnet-union"),
        ("flux", "controlnet-inpaint"),
        ("qwen_image", "eligen"),
        ("wan", "fun-camera"),
        pytest.param("sdxl", "inpaint", marks=pytest.mark.drawn),
        pytest.param("z_image", "controlnet-union", marks=pytest.mark.drawn),
    ],
)
def test_without_a_dataset_a_sample_is_one_that_the_units_take(
    name: str, variant: str, here: Path, dry_run: DryRun
) -> None:
    """A mask is not black, and of several texts one is chosen."""
    flags: dict[str, Any] = {"toy": True, "dataset_base_path": None, "lora_rank": 4}
    found = dry_run(here, model=name, variant=variant, height=64, width=64, **flags)
    assert found.fits
    assert "not known" not in found.page
