"""`dstrain generate --dataset`: files that rows and flags name make the images, and
go into the dataset.
"""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest
import torch
from dstrain import Frames, GenerateConfig, StateError, UsageError, generate
from dstrain.config import NamedInput
from dstrain.plugin import Column, PipelineSpec
from PIL import Image, ImageChops
from torch import Tensor

from tests.support import family
from tests.support.family import weights_of, write
from tests.support.runs import train


class Hint(TypedDict):
    """An image's mean colour."""

    hint: Tensor


def encode_hint(
    hint_image: Image.Image | None = None, hint_frames: Frames | None = None
) -> Hint:
    pixels = np.asarray(hint_image) if hint_image is not None else np.zeros(1)
    pixels = hint_frames.pixels.numpy() if hint_frames is not None else pixels
    return {"hint": torch.tensor(pixels.mean(), dtype=torch.float32).view(1)}


def predict_hinted(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    hint: Tensor,
    *,
    dit: Any,
) -> Tensor:
    return (
        family.predict(noisy_latents, timestep, prompt_emb, prompt_mask, dit=dit)
        + hint.view(-1, 1, 1, 1) / 255
    )


def hinted(plain: PipelineSpec) -> PipelineSpec:
    return replace(
        plain,
        units=(*plain.units, encode_hint),
        model_fn=predict_hinted,
        inputs={
            **plain.inputs,
            "hint_image": Column("hint_image", "image", multiple=8),
            "hint_frames": Column("hint_frames", "video", multiple=8),
        },
    )


@pytest.fixture(autouse=True)
def reads_hints(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {name: hinted(plain) for name, plain in family.PIPELINES.items()}
    monkeypatch.setattr(family, "PIPELINES", specs)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder with two images, to which a table is added."""
    (tmp_path / "given/hints").mkdir(parents=True)
    for name, colour in (("a", "white"), ("b", "black")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"given/hints/{name}.png")
    return tmp_path / "given"


def wanted(folder: Path, table: Path, **rows: list[str]) -> GenerateConfig:
    """A dataset made from a table of these columns, one seed for all rows."""
    write(folder / "model")
    (values,) = rows.values()
    table.write_text(
        json.dumps(
            [{"prompt": "dog", "seed": 1, next(iter(rows)): value} for value in values]
        )
    )
    files = {
        "model": "tiny",
        "variant": "base",
        "model_paths": json.dumps(list(weights_of(folder / "model").values())),
    }
    return GenerateConfig(
        **files, output=folder / "set", dataset=table, num_inference_steps=1
    )


def made(folder: Path) -> list[Image.Image]:
    with (folder / "metadata.csv").open(newline="", encoding="utf-8") as file:
        return [Image.open(folder / row["image"]) for row in csv.DictReader(file)]


def differ(one: Image.Image, other: Image.Image) -> bool:
    return ImageChops.difference(one, other).getbbox() is not None


def trained_on(folder: Path, config: GenerateConfig, column: str) -> Path:
    """The output of a short run on what was made, which reads these files."""
    files = {
        "model_paths": config.model_paths,
        "dataset_base_path": config.output,
        "output_path": folder / "out",
    }
    return train(folder, extra_inputs=column, max_steps=1, **files)


def test_images_that_rows_name_go_into_the_dataset_too(
    given: Path, tmp_path: Path
) -> None:
    config = wanted(
        tmp_path, given / "prompts.json", hint_image=["hints/a.png", "hints/b.png"]
    )
    generate(config)
    assert differ(*made(tmp_path / "set"))
    trained_on(tmp_path, config, "hint_image")
    Image.new("RGB", (8, 8), "red").save(given / "hints/a.png")
    with pytest.raises(StateError, match=r"a.png, of which it should be a copy"):
        generate(config)


def test_a_link_is_copied_by_the_name_that_its_row_has(
    given: Path, tmp_path: Path
) -> None:
    (given / "chosen").symlink_to("hints")
    (given / "first.png").symlink_to("hints/a.png")
    config = wanted(
        tmp_path, given / "prompts.json", hint_image=["first.png", "chosen/./b.png"]
    )
    generate(config)
    copies = [tmp_path / "set" / name for name in ("first.png", "chosen/b.png")]
    assert [one.read_bytes() for one in copies] == [
        (given / f"hints/{name}.png").read_bytes() for name in "ab"
    ]
    assert not any(one.is_symlink() for one in copies)
    trained_on(tmp_path, config, "hint_image")


def test_a_folder_of_frames_is_copied_whole(given: Path, tmp_path: Path) -> None:
    (given / "hints/.hidden").write_text("")
    config = wanted(tmp_path, given / "prompts.json", hint_frames=["hints", ""])
    generate(config)
    assert differ(*made(tmp_path / "set"))
    assert sorted(one.name for one in (tmp_path / "set/hints").iterdir()) == [
        "a.png",
        "b.png",
    ]


@pytest.mark.parametrize("name", ["../given/hints/a.png", "{given}/hints/a.png"])
def test_a_name_by_which_no_copy_would_be_found_is_refused(
    name: str, given: Path, tmp_path: Path
) -> None:
    config = wanted(
        tmp_path, given / "prompts.json", hint_image=[name.format(given=given)]
    )
    with pytest.raises(
        UsageError,
        match=r"prompts.json:1:hint_image: .* would not be found in the generated dataset",
    ):
        generate(config)


def test_a_folder_of_frames_may_be_given_for_all_rows(
    given: Path, tmp_path: Path
) -> None:
    plain = wanted(tmp_path, given / "prompts.json", note=["one", "two"])
    config = replace(plain, input=(NamedInput("hint_frames", str(given / "hints")),))
    generate(config)
    assert not differ(*made(tmp_path / "set"))
    Image.new("RGB", (8, 8), "red").save(given / "hints/a.png")
    with pytest.raises(StateError, match="was generated with different settings"):
        generate(config)
