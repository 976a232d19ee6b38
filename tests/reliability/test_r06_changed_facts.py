"""One thing changes between the stages: stage 2 refuses it by name, or makes what a single
run makes.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.support import ROOT
from tests.support.runs import same
from tests.support.stage_project import (
    Project,
    another_image,
    caption,
    encoder,
    encoder_time,
    image_times,
    moved_folder,
    setting,
    unit_code,
    unit_formatting,
)

DOCS = ROOT / "docs/guide/split-training.md"


def other_folder(project: Project) -> None:
    shutil.copytree(project.data, project.folder / "other")
    project.flags["dataset_base_path"] = project.folder / "other"
    another_image(project.folder / "other/1.png")


@dataclass(frozen=True)
class Fact:
    """A thing that is changed, what a single run then makes, and what stage 2 says."""

    name: str
    """As in the table of the docs."""
    change: Callable[[Project], None]
    unsplit: str
    """'another result' or 'the same result'"""
    refused: str = ""
    """The words with which stage 2 is refused; '' if it is accepted."""

    def __str__(self) -> str:
        return self.name


OTHER, SAME = "another result", "the same result"
FACTS = (
    Fact(
        "base path, with other images", other_folder, OTHER, "other/1.png: is not what"
    ),
    Fact("base path, moved", moved_folder, SAME),
    Fact("a caption", caption, OTHER, "metadata.json: is not what"),
    Fact(
        "bytes of an image",
        lambda project: another_image(project.data / "1.png"),
        OTHER,
        "data/1.png: is not what",
    ),
    Fact("times of images", image_times, SAME),
    Fact("code of a unit", unit_code, OTHER, "unit encode_image code of shading"),
    Fact("formatting and docstring of a unit", unit_formatting, SAME),
    Fact(
        "parameters of a column",
        lambda project: project.install(column={"multiple": 16}),
        OTHER,
        "input input_image multiple: cache 8, this run 16",
    ),
    Fact("a setting", setting, OTHER, "--brightness: cache 1.0, this run 0.5"),
    Fact(
        "the file of an encoder", encoder, OTHER, "vae/model-1-of-1.safetensors: is not"
    ),
    Fact("times of an encoder", encoder_time, SAME),
    Fact("seed", lambda project: project.flags.update(seed=7), OTHER),
    Fact("repeat", lambda project: project.flags.update(dataset_repeat=2), OTHER),
)


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
@pytest.mark.parametrize("fact", FACTS, ids=str)
def test_a_fact_that_changed_between_the_stages(fact: Fact, filled: Project) -> None:
    before = filled.unsplit()
    assert same(filled.stage_2(), before)
    fact.change(filled)
    after = filled.unsplit()
    assert same(after, before) == (fact.unsplit == SAME)
    if fact.refused:
        assert fact.refused in filled.refusal()
        filled.fill()
    assert same(filled.stage_2(), after)


def test_the_table_of_the_docs_is_that_of_the_tests() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+? result) \| (\w+)", DOCS.read_text(), re.M)
    assert rows == [
        (fact.name, fact.unsplit, "refused" if fact.refused else "accepted")
        for fact in FACTS
    ]
