"""`dstrain generate`: what is made is written, what would be ignored is refused, and
how trained weights are tried.
"""

import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import (
    GenerateConfig,
    Pipeline,
    StateError,
    SystemFault,
    UsageError,
    generate,
)
from dstrain.config import LoraFile, NamedInput
from dstrain.data import save_image_or_video
from dstrain.generation.source import PipelineSource
from PIL import Image

from tests.support.family import weights_of
from tests.support.runs import project, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading fails: what is refused is refused before it."""

    def load(self: PipelineSource) -> Pipeline:
        raise AssertionError("loaded")

    monkeypatch.setattr(PipelineSource, "load", load)


def wanted(folder: Path, output: Path, **changes: Any) -> GenerateConfig:
    paths = (
        "["
        + ",".join(
            str(group).replace("'", '"') for group in weights_of(folder).values()
        )
        + "]"
    )
    return GenerateConfig(
        **{
            "model": "tiny",
            "prompt": "dog",
            "model_paths": paths,
            "output": output,
            **changes,
        }
    )


def test_generate_writes_what_the_pipeline_makes(
    model: Path, pipe: Pipeline, tmp_path: Path
) -> None:
    flags = {
        "negative_prompt": "cat",
        "guidance_scale": 2.0,
        "seed": 5,
        "num_inference_steps": 3,
        "height": 24,
    }
    output = tmp_path / "new/folder/x.png"
    generate(wanted(model, output, width=16, **flags))
    assert np.array_equal(
        np.asarray(Image.open(output)),
        np.asarray(pipe(prompt="dog", width=16, **flags)),
    )


def test_what_the_pipeline_refuses_names_the_flag(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        generate(wanted(model, tmp_path / "x.png", denoising_strength=0.5))
    assert str(refused.value).startswith("dstrain: error: --denoising_strength: ")


def test_a_terminal_shows_that_the_latents_are_decoded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    generate(wanted(model, tmp_path / "x.png", num_inference_steps=2))
    assert "decode 100%" in terminal.getvalue()


def test_generate_uses_the_loras_and_their_scales(tmp_path: Path) -> None:
    here = project(tmp_path)
    lora = train(here, learning_rate=0.1, lora_alpha=8.0) / "epoch-0.safetensors"
    images = {}
    for name, files in (
        ("plain", ()), ("nothing", (LoraFile(lora, 0.0),)), ("whole", (LoraFile(lora, 1.0),)),
        ("halves", (LoraFile(lora, 0.5), LoraFile(lora, 0.5))),
    ):  # fmt: skip
        generate(wanted(here / "model", tmp_path / f"{name}.png", lora=files))
        images[name] = np.asarray(Image.open(tmp_path / f"{name}.png")).astype(int)
    assert np.array_equal(images["plain"], images["nothing"])
    assert np.abs(images["whole"] - images["halves"]).max() <= 1
    assert np.abs(images["whole"] - images["plain"]).max() > 5
    with pytest.raises(StateError, match=r"nothing\.safetensors"):
        generate(
            wanted(
                here / "model",
                tmp_path / "x.png",
                lora=(LoraFile(tmp_path / "nothing.safetensors", 1.0),),
            )
        )


def test_generate_at_toy_sizes_needs_no_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        generate(
            GenerateConfig(
                model="tiny", toy=True, prompt="dog", output=tmp_path / f"{name}.png"
            )
        )
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_generate_names_an_output_it_cannot_write(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--output: .*x\.what: \.what is not a supported image format"
    ):
        generate(wanted(model, tmp_path / "x.what"))
    (tmp_path / "file").write_text("")
    with pytest.raises((SystemFault, OSError), match="file"):
        generate(wanted(model, tmp_path / "file/x.png"))


def test_an_image_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, there = tmp_path / "new/a.png", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: there.append(path.exists()))
    save_image_or_video(Image.new("RGB", (8, 8)), path)
    assert there == [False, True]  # the file, and its folder
    assert [file.name for file in path.parent.iterdir()] == ["a.png"]


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("name", ["x.psd", "x.xbm", "x.h5", "x.what", "x", ""])
def test_an_output_that_cannot_be_written_is_refused_before_loading(
    name: str, model: Path, tmp_path: Path
) -> None:
    what = (
        r"is not a supported image format"
        if name
        else "is a folder; give the name of a file"
    )
    with pytest.raises(UsageError, match=what) as refused:
        generate(wanted(model, tmp_path / name))
    assert refused.value.where == "--output"


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("with_table", [False, True])
def test_a_lora_file_that_is_not_there_is_refused_before_loading(
    with_table: bool, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.csv").write_text("prompt,seed\ndog,1\n")
    table = {"dataset": tmp_path / "prompts.csv", "prompt": None} if with_table else {}
    lora = (LoraFile(tmp_path / "nothing.safetensors"),)
    with pytest.raises(StateError, match=r"nothing\.safetensors: no such LoRA file"):
        generate(wanted(model, tmp_path / "x.png", variant="base", lora=lora, **table))


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("flags", "where", "what"),
    [
        (
            {"negative_prompt": "blurry"},
            "--negative_prompt",
            "guidance is off; turn it on with --guidance_scale above 1",
        ),
        (
            {"negative_prompt": "blurry", "guidance_scale": 1.0},
            "--negative_prompt",
            "guidance is off",
        ),
        (
            {"input": (NamedInput("negative_prompt", "blurry"),)},
            "--input negative_prompt",
            "guidance is off",
        ),
        (
            {"input": (NamedInput("input_image", "a.png"),)},
            "--input input_image",
            "nothing starts from it; give --denoising_strength as well",
        ),
        ({"num_frames": 5}, "--num_frames", "variant base has no input 'num_frames'"),
    ],
)
def test_what_would_be_ignored_is_refused_before_loading(
    flags: dict[str, Any],
    where: str,
    what: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (16, 16)).save("a.png")
    with pytest.raises(UsageError, match="has no effect: " + what) as refused:
        generate(wanted(model, tmp_path / "x.png", variant="base", **flags))
    assert refused.value.where == where
