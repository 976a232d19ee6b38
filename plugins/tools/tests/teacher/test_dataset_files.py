"""`dstrain generate --dataset`: files that rows and flags name make the images, and
go into the dataset.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest
import torch
from dstrain import Frames, GenerateConfig, StateError, UsageError, generate
from dstrain.plugin import Column
from PIL import Image
from torch import Tensor

from tests.support import family
from tests.support.generating import generation, pixels, rows_of
from tests.support.runs import train


class Hint(TypedDict):
    """An image's mean colour."""

    hint: Tensor


def encode_hint(
    hint_image: Image.Image | None = None,
    hint_frames: Frames | None = None,
    hint_mask: Image.Image | None = None,
) -> Hint:
    assert hint_mask is None or hint_image is None or hint_mask.size == hint_image.size
    colours = np.asarray(hint_image) if hint_image is not None else np.zeros(1)
    colours = hint_frames.pixels.numpy() if hint_frames is not None else colours
    return {"hint": torch.tensor(colours.mean(), dtype=torch.float32).view(1)}


def predict_hinted(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    hint: Tensor,
    *,
    dit: Any,
) -> Tensor:
    plain = family.predict(noisy_latents, timestep, prompt_emb, prompt_mask, dit=dit)
    return plain + hint.view(-1, 1, 1, 1) / 255


HINTED = replace(
    family.BASE,
    units=(*family.BASE.units, encode_hint),
    model_fn=predict_hinted,
    inputs={
        **family.BASE.inputs,
        "hint_image": Column("hint_image", "image", multiple=8),
        "hint_frames": Column("hint_frames", "video", multiple=8),
        "hint_mask": Column("hint_mask", "image", mode="L", of="hint_image"),
    },
)


@pytest.fixture(autouse=True)
def reads_hints(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(family.PIPELINES, "base", HINTED)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder with two images, to which a table is added."""
    (tmp_path / "given/hints").mkdir(parents=True)
    for name, colour in (("a", "white"), ("b", "black")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"given/hints/{name}.png")
    return tmp_path / "given"


@pytest.fixture
def config(model: Path, given: Path, tmp_path: Path) -> GenerateConfig:
    return generation(model, tmp_path / "set", dataset=given / "prompts.json")


def tabulate(config: GenerateConfig, column: str, *cells: str) -> None:
    """Write a table with this column, and one seed for all rows."""
    rows = [{"prompt": "dog", "seed": 1, column: cell} for cell in cells]
    assert config.dataset is not None
    config.dataset.write_text(json.dumps(rows))


def made(folder: Path) -> list[bytes]:
    return [pixels(folder / row["image"]) for row in rows_of(folder)]


def train_on(config: GenerateConfig, column: str) -> None:
    """Train for a step on what was made, reading this column."""
    train(
        config.output.parent,
        model_paths=config.model_paths,
        dataset_base_path=config.output,
        extra_inputs=column,
        max_steps=1,
    )


def test_images_that_rows_name_go_into_the_dataset_too(
    config: GenerateConfig, given: Path
) -> None:
    tabulate(config, "hint_image", "hints/a.png", "hints/b.png")
    generate(config)
    white, black = made(config.output)
    assert white != black
    train_on(config, "hint_image")
    Image.new("RGB", (8, 8), "red").save(given / "hints/a.png")
    with pytest.raises(StateError, match=str(config.output / "hints/a.png")):
        generate(config)


def test_a_link_is_copied_by_the_name_that_its_row_has(
    config: GenerateConfig, given: Path
) -> None:
    (given / "chosen").symlink_to("hints")
    (given / "first.png").symlink_to("hints/a.png")
    tabulate(config, "hint_image", "first.png", "chosen/./b.png")
    generate(config)
    copies = [config.output / name for name in ("first.png", "chosen/b.png")]
    originals = [given / f"hints/{name}.png" for name in "ab"]
    assert [one.read_bytes() for one in copies] == [
        one.read_bytes() for one in originals
    ]
    assert not any(one.is_symlink() for one in copies)
    train_on(config, "hint_image")


def test_a_folder_of_frames_is_copied_whole(
    config: GenerateConfig, given: Path
) -> None:
    (given / "hints/.hidden").write_text("")
    tabulate(config, "hint_frames", "hints", "")
    generate(config)
    hinted, plain = made(config.output)
    assert hinted != plain
    copies = {one.name for one in (config.output / "hints").iterdir()}
    assert copies == {"a.png", "b.png"}


@pytest.mark.parametrize(
    "name",
    ["../given/hints/a.png", "hints/../../given/hints/a.png", "{given}/hints/a.png"],
)
def test_a_name_by_which_no_copy_would_be_found_is_refused(
    name: str, config: GenerateConfig, given: Path
) -> None:
    tabulate(config, "hint_image", name.format(given=given))
    with pytest.raises(UsageError, match=r"prompts\.json:1:hint_image"):
        generate(config)
