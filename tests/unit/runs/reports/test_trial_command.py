"""The command at the end of a run can be typed as it is: it has a prompt, the size and
the number of steps that were trained.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from dstrain.registry import load_family
from dstrain.runs.checkpoints.directory import PROMPTS
from dstrain.runs.reports.trial_command import input_files, other_inputs
from dstrain.testing.rows import write_rows

from tests.support.runs import project, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def command(
    capsys: pytest.CaptureFixture[str], folder: Path, **flags: Any
) -> dict[str, str]:
    """The flags of the command that a run prints, after both of its stages if it has
    a feature cache.
    """
    capsys.readouterr()
    train(folder, **flags)
    (line,) = (
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("try them: ")
    )
    words = shlex.split(line.removeprefix("try them: "))
    assert words[:2] == ["dstrain", "generate"]
    return {
        name.removeprefix("--"): value
        for name, value in zip(words[2::2], words[3::2], strict=True)
    }


def captioned(folder: Path, *captions: str) -> Path:
    project(folder)
    table = folder / "data/metadata.json"
    rows = json.loads(table.read_text())[: len(captions)]
    for row, caption in zip(rows, captions, strict=True):
        row["prompt"] = caption
    table.write_text(json.dumps(rows))
    return folder


@pytest.mark.parametrize("is_split", [False, True])
def test_it_has_the_first_caption_that_is_not_blank(
    is_split: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = captioned(tmp_path, " ", 'a dog\'s "bed"\n on $HOME', "cat")
    flags: dict[str, Any] = {"output_path": tmp_path / "out", "max_steps": 1}
    if is_split:
        train(folder, task="sft:data_process", feature_cache=tmp_path / "cache")
        flags |= {"task": "sft:train", "feature_cache": tmp_path / "cache"}
        flags["dataset_base_path"] = None
    found = command(capsys, folder, **flags)
    assert found["prompt"] == 'a dog\'s "bed" on $HOME'


def test_a_previews_prompt_goes_before_it_and_a_long_one_is_cut_between_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = captioned(tmp_path, "dog")
    flags: dict[str, Any] = {"preview_prompt": ("word " * 40, "cat"), "max_steps": 1}
    cache = {"feature_cache": tmp_path / "cache"}
    for stages in ({}, cache):
        output = tmp_path / f"out{len(stages)}"
        found = command(capsys, folder, output_path=output, **flags, **stages)
        assert found["prompt"] == " ".join(["word"] * 20)
    output = tmp_path / "stage 2"
    stage_2 = {"task": "sft:train", "max_steps": 1, "output_path": output}
    # The prompts of the feature cache are previewed, too.
    assert command(capsys, folder, **cache, **stage_2)["prompt"][:5] == "word "


def test_previews_and_the_command_have_the_trigger_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = captioned(tmp_path, "dog")
    flags: dict[str, Any] = {"preview_prompt": ("a [trigger] dog",), "max_steps": 1}
    cache = {"feature_cache": tmp_path / "cache"}
    for number, stages in enumerate(({}, cache, {**cache, "task": "sft:train"})):
        output = tmp_path / f"out{number}"
        found = command(
            capsys,
            folder,
            trigger_word="sks",
            output_path=output,
            **flags,
            **stages,
        )
        assert found["prompt"] == "a sks dog"
        (previews, *_) = json.loads((output / PROMPTS).read_text()).values()
        assert [one["prompt"] for one in previews] == ["a sks dog"]


def test_a_long_caption_without_blanks_is_cut_between_letters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = command(capsys, captioned(tmp_path, "一只狗" * 40), max_steps=1)
    assert found["prompt"] == ("一只狗" * 34)[:100]


def test_without_captions_it_says_that_one_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = captioned(tmp_path, "", " ")
    found = command(capsys, folder, output_path=tmp_path / "out", max_steps=1)
    assert found["prompt"] == "..."


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((16, 24), ("16", "24")),
        ((16, 16), (None, None)),  # as by default
        ((None, None), (None, None)),  # of two sizes, neither is the one
    ],
)
def test_it_has_the_size_of_the_run(
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    size: tuple[int | None, int | None],
    wanted: tuple[str | None, str | None],
) -> None:
    height, width = size
    flags = {"max_steps": 1, "height": height, "width": width}
    found = command(capsys, here, output_path=tmp_path, **flags)
    assert (found.get("height"), found.get("width")) == wanted


def test_it_has_the_size_of_the_samples_if_they_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project(tmp_path)
    table = tmp_path / "data/metadata.json"
    rows = json.loads(table.read_text())
    table.write_text(json.dumps(rows[1:2]))  # the second of two sizes
    flags: dict[str, Any] = {"max_steps": 1, "feature_cache": tmp_path / "cache"}
    for number, task in enumerate(("sft", "sft:train")):
        output = tmp_path / f"out{number}"
        found = command(capsys, tmp_path, output_path=output, task=task, **flags)
        assert (found["height"], found["width"]) == ("16", "24")


@pytest.mark.parametrize("is_split", [False, True])
def test_of_a_student_it_has_the_number_of_its_steps(
    is_split: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project(tmp_path)
    table = tmp_path / "data/metadata.json"
    rows = json.loads(table.read_text())
    for row in rows:
        row |= {"seed": 1, "num_inference_steps": 2}
    table.write_text(json.dumps(rows))
    flags: dict[str, Any] = {"task": "direct_distill", "max_steps": 1}
    if is_split:
        flags["feature_cache"] = tmp_path / "cache"
    found = command(capsys, tmp_path, output_path=tmp_path / "out", **flags)
    assert (found["num_inference_steps"], found["guidance_scale"]) == ("2", "1")


@pytest.mark.parametrize(
    ("family", "variant", "inputs"),
    [
        ("flux", "dev", []),
        ("flux", "kontext", ["kontext_images"]),
        ("wan", "i2v", ["input_image", "end_image"]),
        ("wan", "ti2v-5b", ["input_image"]),
    ],
)
def test_the_command_to_try_asks_for_the_files_that_inference_reads(
    family: str, variant: str, inputs: list[str]
) -> None:
    spec = load_family(family).spec(variant)
    assert input_files(spec, frozenset(spec.inputs)) == inputs
    optional = {
        name for name in inputs if getattr(spec.inputs[name], "optional", False)
    }
    without = input_files(spec, frozenset(spec.inputs) - optional)
    assert without == [name for name in inputs if name not in optional]


@pytest.mark.parametrize(
    ("family", "variant", "inputs"),
    [
        ("flux", "dev", []),
        ("flux", "controlnet-union", ["controlnet_processor_id"]),
        ("qwen_image", "eligen", ["eligen_entity_prompts"]),
        ("qwen_image", "layered", ["layer_num"]),
        ("wan", "fun-camera", ["camera_control_direction"]),
        ("wan", "speedcontrol", ["motion_bucket_id"]),
    ],
)
def test_it_has_the_other_inputs_that_inference_needs(
    family: str, variant: str, inputs: list[str]
) -> None:
    assert other_inputs(load_family(family).spec(variant)) == inputs


@pytest.mark.parametrize("is_split", [False, True])
def test_other_inputs_have_the_value_of_the_first_row_or_ask_for_one(
    is_split: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = load_family("qwen_image").spec("eligen")
    flags: dict[str, Any] = {
        "model": "qwen_image",
        "variant": "eligen",
        "toy": True,
        "model_paths": None,
        "dataset_base_path": write_rows(spec, tmp_path / "data"),
        "lora_target_modules": None,
        "max_steps": 1,
    }
    if is_split:
        flags["feature_cache"] = tmp_path / "cache"
    rows = json.loads((tmp_path / "data/metadata.json").read_text())
    wanted = "VALUE" if is_split else rows[0]["eligen_entity_prompts"][0]
    found = command(capsys, tmp_path, output_path=tmp_path / "out", **flags)
    assert found["input"] == f"eligen_entity_prompts={wanted}"


@pytest.mark.parametrize(
    ("number", "said"), [(1, "layer_num=1"), (4, "layer_input_image=FILE")]
)
def test_an_input_that_has_a_default_has_the_value_of_the_first_row_if_that_is_another(
    number: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = load_family("qwen_image").spec("layered")
    data = write_rows(spec, tmp_path / "data")
    rows = json.loads((data / "metadata.json").read_text())
    for row in rows:
        row["layer_num"] = number
        row["image"] = row["image"][:1] * (number + 1)
    (data / "metadata.json").write_text(json.dumps(rows))
    found = command(
        capsys,
        tmp_path,
        output_path=tmp_path / "out",
        model="qwen_image",
        variant="layered",
        toy=True,
        model_paths=None,
        dataset_base_path=data,
        lora_target_modules=None,
        max_steps=1,
    )
    # The last of several.
    assert found["input"] == said
