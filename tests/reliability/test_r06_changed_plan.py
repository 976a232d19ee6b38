"""What the plan says beside the contents of files is compared: units, columns, components
and model ids.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.family import weights_of
from tests.support.runs import project_by_id
from tests.support.stage_project import UNITS, Project

pytestmark = pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)


def unit_that_reads_more(project: Project) -> None:
    project.install(
        UNITS.replace("brightness: float,", "brightness: float, prompt: str = '',")
    )


def unit_of_another_version(project: Project) -> None:
    project.install(version=7)


def configuration_of_an_encoder(project: Project) -> None:
    path = project.folder / "model/vae/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eps": 0.5}))


def another_set_of_files(project: Project) -> None:
    """A second encoder in two files, where the first had one."""
    shutil.copytree(project.folder / "model", project.folder / "second")
    path = project.folder / "second/vae/model-1-of-1.safetensors"
    weights = load_file(path)
    path.unlink()
    for i, part in enumerate((list(weights)[:2], list(weights)[2:]), 1):
        save_file(
            {name: weights[name] for name in part},
            path.with_name(f"model-{i}-of-2.safetensors"),
        )
    project.flags["model_paths"] = json.dumps(
        list(weights_of(project.folder / "second").values())
    )


PLANS = (
    (unit_that_reads_more, "unit encode_image reads: cache {'brightness': 'brightness', 'input_image'"),
    (unit_of_another_version, "unit encode_image version: cache"),
    (configuration_of_an_encoder, "vae: has another configuration than when the feature cache was filled: eps"),
    (another_set_of_files, "model-1-of-2.safetensors: is not what the feature cache"),
)  # fmt: skip


@pytest.mark.parametrize("case", PLANS, ids=lambda case: case[0].__name__)
def test_what_stage_2_can_know_of_the_plan_is_compared(
    case: tuple[Callable[[Project], None], str], filled: Project
) -> None:
    change, words = case
    assert filled.stage_2()
    change(filled)
    assert words in filled.refusal()


@pytest.mark.parametrize(
    ("entry", "value", "before"),
    [
        ("mode", "L", "RGB"),
        ("fps", 15.0, 0.0),
        ("frame_multiple", 4, 0),
        ("frame", "first", ""),
        ("name", "picture", "image"),
        ("same_in_batch", True, False),
    ],
)
def test_what_a_column_is_is_compared(
    entry: str, value: Any, before: Any, filled: Project
) -> None:
    filled.install(column={entry: value})
    words = f"input input_image {entry}: cache {before}, this run {value}"
    assert words in filled.refusal()


IDS = (
    ("Tiny/Other:vae/*.safetensors", "was filled with vae of Tiny/Tiny, and this run names Tiny/Other"),
    ("Tiny/Tiny@v2:vae/*.safetensors", "was filled with text_encoder of Tiny/Tiny, and this run names Tiny/Tiny@v2"),
    ("Tiny/Tiny:vae/*.safetensors", ""),
    ("", ""),
)  # fmt: skip
"""How stage 2 names the encoder of images, and why it is refused. A revision holds for
all files of a model.
"""


@pytest.mark.parametrize(("named", "words"), IDS)
def test_model_ids_and_revisions_are_compared(
    named: str, words: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(project_by_id(tmp_path, monkeypatch), monkeypatch)
    project.install()
    rest = "Tiny/Tiny:transformer/*.safetensors,Tiny/Tiny:text_encoder/*.safetensors"
    flag = "model_id_with_origin_paths"
    project.fill(model_paths=None, **{flag: f"{rest},Tiny/Tiny:vae/*.safetensors"})
    given = {"model_paths": None, flag: f"{rest},{named}".strip(",")}
    if words:
        assert words in project.refusal(**given)
    else:
        assert project.stage_2(**given)
