"""The sample that is counted is the largest, and nothing is decoded for it."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import TrainConfig, UsageError, run
from dstrain.runs import Setup, open_training_data
from dstrain.runs.memory.samples import (
    LargestSample,
    largest_sample,
    of_cache,
    of_flags,
    of_largest,
)
from dstrain.runs.resolve import resolve
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")


def setup_of(folder: Path, **flags: Any) -> Setup:
    return resolve(config(project(folder), **flags))


def test_of_a_dataset_it_has_the_largest_image_and_the_longest_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of(tmp_path)
    dataset = setup.dataset

    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("decoded an image")

    monkeypatch.setattr(Image.Image, "load", refuse)
    largest = largest_sample(setup, dataset)
    assert largest is not None
    as_recorded = json.loads(json.dumps(asdict(largest)))
    chosen = of_largest(setup, LargestSample(**as_recorded))
    monkeypatch.undo()
    assert chosen.sample.values["input_image"].size == (24, 16)
    assert chosen.sample.values["prompt"] == "two dogs on a bridge"
    assert "with the longest prompt" in chosen.origin


def test_of_flags_it_has_their_size(tmp_path: Path) -> None:
    chosen = of_flags(setup_of(tmp_path, height=32, width=64))
    assert chosen.sample.values["input_image"].size == (64, 32)
    assert chosen.origin == "a sample of 64 x 32 with a prompt of 512 letters"
    square = of_flags(setup_of(tmp_path / "other", max_pixels=1000))
    assert square.sample.values["input_image"].size == (24, 24)


def test_of_a_cache_it_is_the_largest_stored(tmp_path: Path) -> None:
    cache = {"feature_cache": tmp_path / "cache"}
    run(config(project(tmp_path), task="sft:data_process", **cache))
    setup = resolve(config(tmp_path, task="sft:train", **cache))
    data = open_training_data(setup)
    chosen = of_cache(data)

    def size(values: Mapping[str, Any]) -> int:
        return sum(one.nbytes for one in values.values() if isinstance(one, Tensor))

    sizes = [size(data.source.sample(*one).values) for one in data.sample_ids]
    assert size(chosen.sample.values) == max(sizes)
    assert re.fullmatch(
        r"the largest of \d samples of the feature cache", chosen.origin
    )


def test_tensors_are_as_large_as_their_files_say_and_unknown_without_a_dataset(
    tmp_path: Path,
) -> None:
    setup = setup_of(tmp_path)
    rows = json.loads((tmp_path / "data/metadata.json").read_text())
    for row, steps in zip(rows, (1, 1, 5, 1, 1, 1), strict=True):
        row |= {"trajectory": f"{steps}.safetensors", "num_inference_steps": steps}
        tensors = {
            "latents": torch.ones(1, steps + 1, 4, 64, 64),
            "sigmas": torch.ones(1, steps + 1),
        }
        save_file(tensors, tmp_path / "data" / row["trajectory"])
    (tmp_path / "data/metadata.json").write_text(json.dumps(rows))
    setup = resolve(config(tmp_path, task="trajectory_imitation"))
    largest = largest_sample(setup, setup.dataset)
    assert largest is not None
    read = LargestSample(**json.loads(json.dumps(vars(largest))))
    found = of_largest(setup, read).sample.values["trajectory"]
    shapes = {name: list(one.shape) for name, one in found.items()}
    assert shapes == {"latents": [1, 6, 4, 64, 64], "sigmas": [1, 6]}
    with pytest.raises(UsageError, match="whose size its files tell"):
        of_flags(setup)


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("flux", "controlnet-union"),
        ("flux", "controlnet-inpaint"),
        ("qwen_image", "inpaint"),
        ("qwen_image", "eligen"),
        ("wan", "fun-camera"),
    ],
)
def test_of_flags_it_is_one_that_the_units_take(
    family: str, variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mask is not black, and of several texts one is chosen."""
    flags: dict[str, Any] = {"toy": True, "dry_run": True, "device_memory": "24"}
    size = {"height": 64, "width": 64}
    run(
        TrainConfig(
            model=family, variant=variant, output_path=Path("out"), **flags, **size
        )
    )
    out = capsys.readouterr().out
    assert "it fits on --device_memory 24" in out
    assert "not known" not in out
