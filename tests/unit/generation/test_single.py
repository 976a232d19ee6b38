"""`dstrain generate`: what is made is written, what would be ignored is refused, and
how trained weights are tried.
"""

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain.cli.main import main
from dstrain.config.fields import LoraFile, NamedInput
from dstrain.config.schema import GenerateConfig
from dstrain.data.output import save_image_or_video
from dstrain.errors import StateError, SystemFault, UsageError
from dstrain.generation.run import generate
from dstrain.generation.source import PipelineSource
from dstrain.graph.spec import ExpertSchedule
from dstrain.models.locate import ModelConfig
from dstrain.pipeline.pipeline import Pipeline
from PIL import Image

from tests.support import family
from tests.support.family import weights_of, write
from tests.support.runs import project, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write(folder)
    return folder


@pytest.fixture
def pipe(model: Path) -> Pipeline:
    return Pipeline.from_pretrained(
        "tiny", [ModelConfig(path=paths) for paths in weights_of(model).values()]
    )


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
            "guidance is off; it is on with --guidance_scale above 1",
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
            "variant base does not use it",
        ),
        ({"num_frames": 5}, "--num_frames", "variant base has no such input"),
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


def said(captured: pytest.CaptureFixture[str]) -> tuple[list[str], list[Any], str]:
    """The words of the command said at a run's end, its model files, and the advice
    after it.
    """
    line = next(
        line
        for line in captured.readouterr().err.splitlines()
        if line.startswith("try them: ")
    )
    command, _, advice = line.removeprefix("try them: ").partition(" (")
    words = shlex.split(command)
    paths = (
        json.loads(words[words.index("--model_paths") + 1])
        if "--model_paths" in words
        else []
    )
    return words, paths, advice


ADVICE = "add the model files of the other components: "


def two_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the family have `dit` for the noisier half of the timesteps, and its twin
    `dit2`.
    """

    spec = replace(
        family.BASE,
        components=("dit", "dit2", "text_encoder", "vae", "tokenizer"),
        experts=ExpertSchedule("dit", {"dit": (500.0, 1000.0), "dit2": (0.0, 500.0)}),
    )
    (dit,) = (component for component in family.COMPONENTS if component.name == "dit")
    twin = replace(dit, name="dit2", folder="transformer_2")
    monkeypatch.setattr(family, "COMPONENTS", (dit, twin, *family.COMPONENTS[1:]))
    monkeypatch.setattr(family, "PIPELINES", {"base": spec, "other": spec})


def denoiser(model: Path, place: Path) -> list[str]:
    """A copy of a model's denoiser in a folder of this name."""
    shutil.copytree(model / "transformer", place)
    return sorted(map(str, place.glob("*.safetensors")))


@pytest.mark.parametrize(
    ("places", "trained", "order"),
    [
        (("a", "b"), ("dit",), ("trained dit", "b")),
        (("a", "b"), ("dit2",), ("a", "trained dit2")),
        (("a", "b"), ("dit", "dit2"), ("trained dit", "trained dit2")),
        (("transformer_2", "a"), ("dit2",), ("a", "trained dit2")),
        (
            ("transformer_2", "transformer"),
            ("dit", "dit2"),
            ("trained dit", "trained dit2"),
        ),
    ],
)
def test_a_trained_expert_stands_where_its_order_tells_which_it_is(
    places: Sequence[str],
    trained: Sequence[str],
    order: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    two_experts(monkeypatch)
    here = project(tmp_path)
    files: dict[str, Any] = {
        place: denoiser(here / "model", here / place) for place in places
    }
    others = [weights_of(here / "model")[name] for name in ("text_encoder", "vae")]
    given = json.dumps([*files.values(), *others])
    tokenizer = {"tokenizer_path": str(here / "model/tokenizer")}
    train(
        here,
        trainable_models=",".join(trained),
        max_steps=1,
        model_paths=given,
        family_options=tokenizer,
    )
    words, paths, advice = said(capsys)
    suffix = {name: f".{name}" if len(trained) > 1 else "" for name in trained}
    files |= {
        f"trained {name}": f"{here}/out/step-1{suffix[name]}.safetensors"
        for name in trained
    }
    assert paths == [*(files[name] for name in order), *(path for (path,) in others)]
    assert not advice
    monkeypatch.chdir(tmp_path)
    assert main([*words[1:], "--num_inference_steps", "2"]) == 0


@pytest.mark.parametrize(
    ("flags", "lacking"),
    [
        ({}, "text_encoder, vae"),
        ({"trainable_models": "dit"}, "text_encoder, vae"),
        ({"model_id_with_origin_paths": "Tiny/Tiny:vae/*.safetensors"}, "text_encoder"),
    ],
)
def test_the_command_names_components_that_stage_2_was_not_given(
    flags: Mapping[str, Any],
    lacking: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = project(tmp_path)
    train(here, task="sft:data_process", feature_cache=here / "cache", **flags)
    only = json.dumps([weights_of(here / "model")["dit"]])
    train(
        here,
        task="sft:train",
        feature_cache=here / "cache",
        model_paths=only,
        max_steps=1,
        **flags,
    )
    assert said(capsys)[2] == f"{ADVICE}{lacking})"


def test_the_command_names_the_expert_that_was_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two_experts(monkeypatch)
    here = project(tmp_path)
    given = {
        **weights_of(here / "model"),
        "dit": denoiser(here / "model", here / "transformer_2"),
    }
    tokenizer = {"tokenizer_path": str(here / "model/tokenizer")}
    files = json.dumps(list(given.values()))
    for name, flags in (("lora", {}), ("full", {"trainable_models": "dit2"})):
        train(
            here,
            max_steps=1,
            model_paths=files,
            family_options=tokenizer,
            output_path=here / name,
            **flags,
        )
        assert said(capsys)[2] == f"{ADVICE}dit)"


@pytest.mark.parametrize(
    ("flags", "advice"),
    [({}, ""), ({"trainable_models": "dit"}, f"{ADVICE}text_encoder, vae)")],
)
def test_the_command_of_a_toy_names_what_its_trained_weights_lack(
    flags: Mapping[str, Any],
    advice: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = project(tmp_path)
    train(here, toy=True, max_steps=1, **flags)
    assert said(capsys)[2] == advice
