"""What changed between the stages is recomputed, refused by name, or accepted: nothing is
used that a single run would not compute.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from accelerate import Accelerator
from dstrain.cli.main import main
from dstrain.distributed.world import ProcessGroup
from dstrain.errors import StateError
from dstrain.graph.inputs import Column, Constant
from dstrain.graph.noise_schedule import FlowMatchSchedule
from dstrain.graph.spec import PipelineSpec
from dstrain.graph.task import Task
from dstrain.graph.unit import FunctionSpec, Unit
from dstrain.lora.layers import Trainables
from dstrain.runs import feature_plan
from dstrain.runs.precompute import data_process
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.reliability.test_r10_split_equivalence import equal, run, write_program
from tests.support import family
from tests.support.family import weights_of, write, write_data
from tests.support.programs import (
    INPUTS,
    NETS,
    WIDTH,
    Program,
    loss_body,
    predict_body,
    unit_body,
)
from tests.support.runs import CAPTIONS, outcome, project_by_id, same, train
from tests.support.units import declared

# Every presence: rows that lack an input, and a unit that reads what is not always there.

ROWS = tuple(
    {"prompt": prompt, "negative": "", "number": number, "image": image}
    for prompt, number, image in (
        ("a dog", "7", "small.png"),
        ("a cat", "", "small.png"),
        ("a dog", "7", ""),
        ("two cats", "-3", ""),
        ("a", "", ""),
        ("b", "", ""),
    )
)
ORDERS = ("look count join", "count look join", "look join count", "count join look")
"""Units in the order in which they are written; `join` reads what those before it make, if
they do.
"""
TRAINED = (
    ("dit",),
    ("dit", "net_a"),
    ("dit", "net_b"),
    ("dit", "net_c"),
    ("net_a", "net_b"),
)
"""Networks trained: `net_a` is what `look` uses, `net_b` `join` and `net_c` `count`."""


@dataclass(frozen=True)
class Presence:
    """A pipeline, and what each stage trains."""

    order: str
    first: tuple[str, ...]
    second: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.order}, {'+'.join(self.first)} then {'+'.join(self.second)}"


PRESENCES = tuple(Presence(*one) for one in product(ORDERS, TRAINED, TRAINED))


def program(order: str, trained: tuple[str, ...]) -> Program:
    """A pipeline of units that rows may lack inputs for."""
    units: list[Unit] = []
    reads = {
        "look": ({"picture": True}, ("net_a",)),
        "count": ({"number": True}, ("net_c",)),
        "join": ({"prompt": False}, ("net_b",)),
    }
    made: dict[str, bool] = {}
    for name in order.split():
        inputs, uses = reads[name]
        if name == "join":
            inputs |= made
        outputs = {f"{name}ed": "tensor"}
        made |= dict.fromkeys(outputs, False)
        body = partial(unit_body, outputs, uses)
        units.append(declared(name, body, inputs, uses, outputs))
    read = {name: name == "joined" for name in made}
    spec = PipelineSpec(
        family="random",
        variant="base",
        components=NETS,
        units=tuple(units),
        # It uses all networks, so that each may be trained for every row.
        model_fn=FunctionSpec("predict", partial(predict_body, NETS), read, NETS),
        decoders=(),
        inputs=INPUTS,
        schedule=FlowMatchSchedule(shift=3.0),
        latent_shape=FunctionSpec("shape", lambda: (1, WIDTH)),
        apply_guidance=lambda positive, negative, scale: positive,
        cfg_inputs={"prompt": "negative_prompt"},
    )
    context = ("rng", "timestep_sampler", "constrain_latents")
    loss = partial(loss_body, (), ("positive",))
    task = Task("random", FunctionSpec("loss", loss, {"joined": True}, context))
    dropouts = dict.fromkeys(NETS, 0.0)
    return Program(spec, task, Trainables(trained), dropouts, ROWS, 2)


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
@pytest.mark.parametrize("case", PRESENCES, ids=str)
def test_rows_that_lack_an_input_train_as_in_a_single_run(
    case: Presence, tmp_path: Path
) -> None:
    processes = ProcessGroup(Accelerator(cpu=True))
    first = write_program(program(case.order, case.first), tmp_path)
    data_process(replace(first, stage="data_process"), processes)
    second = replace(first, trainables=Trainables(case.second))
    plans = [
        [setup.plan(frozenset(row)) for row in setup.dataset.rows]
        for setup in (first, second)
    ]
    values = [[plan.cached_values for plan in one] for one in plans]
    if values[0] == values[1]:
        unsplit = run(second)[2]
        assert equal(unsplit, run(replace(second, stage="train"))[2])
        return
    with pytest.raises(StateError, match="contains no plan for this run") as caught:
        run(replace(second, stage="train"))
    assert "cached values" in str(caught.value)


# Facts: one thing changes between the stages, and in a single run.

DOCS = Path(__file__).parents[2] / "docs/guide/split-training.md"
UNITS = '''
from typing import TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor


class Latents(TypedDict):
    input_latents: Tensor


def encode_image(
    input_image: Image.Image, brightness: float, *, vae, dtype
) -> Latents:
    """Return fp32 latents."""
    pixels = torch.from_numpy(np.array(input_image)).permute(2, 0, 1)[None]
    pixels = pixels / 127.5 - 1
    return {"input_latents": brightness * vae.encoder(pixels.to(dtype)).float()}
'''
COLUMN = MappingProxyType({"name": "image", "kind": "image", "multiple": 8})
modules = count()


@dataclass
class Project:
    """A dataset, a model, a variant that can be changed, and the runs of both ways."""

    folder: Path
    patch: pytest.MonkeyPatch
    flags: dict[str, Any] = field(default_factory=dict)
    """Flags of every run."""
    runs: int = 0

    @property
    def data(self) -> Path:
        """The dataset's folder."""
        return self.folder / "data"

    @property
    def vae(self) -> Path:
        """The weights of the encoder of images."""
        return self.folder / "model/vae/model-1-of-1.safetensors"

    def install(
        self,
        source: str = UNITS,
        brightness: float = 1.0,
        version: int = 1,
        column: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Install the variant with units of this source."""
        path = self.folder / f"units_{next(modules)}" / "shading.py"
        path.parent.mkdir()
        path.write_text(source)
        found = importlib.util.spec_from_file_location("shading", path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        self.patch.setitem(sys.modules, "shading", module)
        found.loader.exec_module(module)
        inputs = {
            **family.BASE.inputs,
            "input_image": Column(**{**COLUMN, **column}),
            "brightness": Constant(brightness),
        }
        units = (family.encode_prompt, Unit(module.encode_image, version))
        spec = replace(family.BASE, units=units, inputs=inputs)
        self.patch.setitem(family.PIPELINES, "base", spec)

    def fill(self, **flags: Any) -> None:
        """Run stage 1."""
        given = {"feature_cache": self.folder / "cache", **self.flags, **flags}
        train(self.folder, task="sft:data_process", **given)

    def stage_2(self, **flags: Any) -> Any:
        """Run stage 2, and return what it wrote."""
        given = {"feature_cache": self.folder / "cache", **self.flags, **flags}
        return self._trained(task="sft:train", **given)

    def unsplit(self, **flags: Any) -> Any:
        """Train in a single run, and return what it wrote."""
        return self._trained(**{**self.flags, **flags})

    def refusal(self, **flags: Any) -> str:
        """The words with which stage 2 is refused."""
        with pytest.raises(StateError) as caught:
            self.stage_2(**flags)
        assert caught.value.exit_code == 3
        return str(caught.value)

    def _trained(self, **flags: Any) -> Any:
        self.runs += 1
        output = self.folder / f"out_{self.runs}"
        made = outcome(train(self.folder, output_path=output, **flags))
        return {name: made[name] for name in ("files", "log")}


@pytest.fixture
def made(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose cache is filled."""
    project = Project(tmp_path, monkeypatch)
    write(tmp_path / "model")
    write_data(project.data, CAPTIONS[:3], ((16, 16), (16, 24)))
    project.install()
    project.fill()
    return project


def other_folder(project: Project) -> None:
    shutil.copytree(project.data, project.folder / "other")
    project.flags["dataset_base_path"] = project.folder / "other"
    another_image(project.folder / "other/1.png")


def moved_folder(project: Project) -> None:
    project.data.rename(project.folder / "moved")
    project.flags["dataset_base_path"] = project.folder / "moved"


def caption(project: Project) -> None:
    path = project.data / "metadata.json"
    path.write_text(path.read_text().replace("dog", "cat"))


def another_image(path: Path) -> None:
    """Replace an image by another one; a bitmap of equal size in bytes."""
    image = Image.open(path)
    image.transpose(Image.Transpose.ROTATE_180).save(path)


def image_bytes(project: Project) -> None:
    another_image(project.data / "1.png")


def image_times(project: Project) -> None:
    for path in project.data.iterdir():
        os.utime(path, (1, 1))


def column(project: Project) -> None:
    project.install(column={"multiple": 16})


def setting(project: Project) -> None:
    project.install(brightness=0.5)


def encoder(project: Project) -> None:
    weights = load_file(project.vae)
    save_file({name: value * 2 for name, value in weights.items()}, project.vae)


def encoder_time(project: Project) -> None:
    os.utime(project.vae, (1, 1))


def unit_code(project: Project) -> None:
    project.install(UNITS.replace("127.5 - 1", "127.5 - 0.5"))


def unit_formatting(project: Project) -> None:
    source = UNITS.replace(
        "\n    pixels = pixels /", "  # scaled\n\n    pixels = pixels /"
    )
    project.install(source.replace('"""Return fp32 latents."""', '"""Encode."""'))


def seed(project: Project) -> None:
    project.flags["seed"] = 7


def repeat(project: Project) -> None:
    project.flags["dataset_repeat"] = 2


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
    Fact("bytes of an image", image_bytes, OTHER, "data/1.png: is not what"),
    Fact("times of images", image_times, SAME),
    Fact("code of a unit", unit_code, OTHER, "unit encode_image code: cache"),
    Fact("formatting and docstring of a unit", unit_formatting, SAME),
    Fact(
        "parameters of a column",
        column,
        OTHER,
        "input input_image multiple: cache 8, this run 16",
    ),
    Fact("a setting", setting, OTHER, "--brightness: cache 1.0, this run 0.5"),
    Fact(
        "the file of an encoder", encoder, OTHER, "vae/model-1-of-1.safetensors: is not"
    ),
    Fact("times of an encoder", encoder_time, SAME),
    Fact("seed", seed, OTHER),
    Fact("repeat", repeat, OTHER),
)


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
@pytest.mark.parametrize("fact", FACTS, ids=str)
def test_a_fact_that_changed_between_the_stages(fact: Fact, made: Project) -> None:
    before = made.unsplit()
    assert same(made.stage_2(), before)
    fact.change(made)
    after = made.unsplit()
    assert same(after, before) == (fact.unsplit == SAME)
    if fact.refused:
        assert fact.refused in made.refusal()
        made.fill()
    assert same(made.stage_2(), after)


def test_the_table_of_the_docs_is_that_of_the_tests() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+? result) \| (\w+)", DOCS.read_text(), re.M)
    assert rows == [
        (fact.name, fact.unsplit, "refused" if fact.refused else "accepted")
        for fact in FACTS
    ]


# Data sets: which plan a folder asks for.


def both(project: Project, first: str = "data", second: str = "other") -> None:
    """Fill the cache from two folders of other images, with one metadata file."""
    shutil.copytree(project.data, project.folder / "other")
    another_image(project.folder / "other/1.png")
    metadata = project.folder / "metadata.json"
    (project.data / "metadata.json").rename(metadata)
    (project.folder / "other/metadata.json").unlink()
    project.flags["dataset_metadata_path"] = metadata
    for name in (first, second):
        project.fill(dataset_base_path=project.folder / name)


def names_the_first(project: Project) -> str:
    both(project)
    return "data"


def names_the_second(project: Project) -> str:
    both(project)
    return "other"


def fills_in_the_other_order(project: Project) -> str:
    both(project, "other", "data")
    return "other"


def moves_the_first(project: Project) -> str:
    both(project)
    project.data.rename(project.folder / "moved")
    return "moved"


def moves_the_second(project: Project) -> str:
    both(project)
    (project.folder / "other").rename(project.folder / "moved")
    return "moved"


def moves_the_first_twice(project: Project) -> str:
    both(project)
    project.data.rename(project.folder / "moved")
    project.fill(dataset_base_path=project.folder / "moved")
    (project.folder / "moved").rename(project.folder / "moved again")
    return "moved again"


def moves_the_second_to_the_first(project: Project) -> str:
    both(project)
    project.data.rename(project.folder / "moved")
    (project.folder / "other").rename(project.data)
    return "data"


def touches_a_copy(project: Project) -> str:
    both(project)
    shutil.copytree(project.data, project.folder / "copy", copy_function=shutil.copy)
    return "copy"


def has_a_third_folder_of_some_images(project: Project) -> str:
    both(project)
    (project.folder / "part").mkdir()
    shutil.copy(project.folder / "other/1.png", project.folder / "part/1.png")
    return "part"


def has_more_rows_than_are_looked_at(project: Project) -> str:
    both(project)
    project.patch.setattr(feature_plan, "MOST_ROWS", 2)
    return "other"


SAME_METADATA: tuple[tuple[Callable[[Project], str], str], ...] = (
    (names_the_first, "data"),
    (names_the_second, "other"),
    (fills_in_the_other_order, "other"),
    (moves_the_first, "moved"),
    (moves_the_second, "moved"),
    (moves_the_first_twice, "moved again"),
    (moves_the_second_to_the_first, "data"),
    (touches_a_copy, "copy"),
    (has_a_third_folder_of_some_images, "other"),
    (has_more_rows_than_are_looked_at, "other"),
)
"""A place of two data sets with equal metadata, and the folder that a single run reads to
the same result.
"""


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
@pytest.mark.parametrize("case", SAME_METADATA, ids=lambda case: case[0].__name__)
def test_of_two_datasets_with_equal_metadata_the_named_one_is_used(
    case: tuple[Callable[[Project], str], str], made: Project
) -> None:
    arrange, same_as = case
    named = arrange(made)
    stored = made.stage_2(dataset_base_path=made.folder / named)
    assert same(stored, made.unsplit(dataset_base_path=made.folder / same_as))


def third_dataset(project: Project) -> tuple[dict[str, Any], str]:
    both(project)
    shutil.copytree(project.data, project.folder / "third")
    another_image(project.folder / "third/0.png")
    return {"dataset_base_path": project.folder / "third"}, "third/0.png: is not what"


def neither(project: Project) -> tuple[dict[str, Any], str]:
    both(project)
    return {"dataset_base_path": None}, "contains this plan for 2 datasets"


def cache_as_the_base_path(project: Project) -> tuple[dict[str, Any], str]:
    both(project)
    flags = {"dataset_base_path": project.folder / "cache", "feature_cache": None}
    return flags, "contains this plan for 2 datasets"


def unknown_folder_of_too_many_rows(project: Project) -> tuple[dict[str, Any], str]:
    both(project)
    project.patch.setattr(feature_plan, "MOST_ROWS", 2)
    (project.folder / "unknown").mkdir()
    flags = {"dataset_base_path": project.folder / "unknown"}
    return flags, "contains this plan for 2 datasets"


def other_root(project: Project) -> tuple[dict[str, Any], str]:
    for name in ("first", "second"):
        (project.folder / name).mkdir()
        for path in project.data.glob("*.png"):
            shutil.copy(path, project.folder / name)
    another_image(project.folder / "second/2.png")
    for path in project.data.glob("*.png"):
        path.unlink()
    project.fill(dataset_root=(project.folder / "first",))
    assert project.stage_2(dataset_root=(project.folder / "first",))
    flags = {"dataset_root": (project.folder / "second",)}
    return flags, "second/2.png: is not what"


REFUSED_DATASETS = (
    third_dataset,
    neither,
    cache_as_the_base_path,
    unknown_folder_of_too_many_rows,
    other_root,
)


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
@pytest.mark.parametrize("arrange", REFUSED_DATASETS)
def test_a_dataset_that_is_in_no_plan_or_in_two_is_refused(
    arrange: Callable[[Project], tuple[dict[str, Any], str]], made: Project
) -> None:
    flags, words = arrange(made)
    assert words in made.refusal(**flags)


def test_more_rows_than_are_looked_at_are_said(
    made: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    made.patch.setattr(feature_plan, "MOST_ROWS", 2)
    another_image(made.data / "1.png")
    made.stage_2()
    (line,) = [
        one for one in capsys.readouterr().err.splitlines() if "not compared" in one
    ]
    assert (
        "files of more than 2 rows are not compared with those that stage 1 read"
        in line
    )


def test_stage_2_says_how_many_rows_stage_1_skipped(
    made: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    made.stage_2()
    assert "rows are skipped" not in capsys.readouterr().err
    (made.data / "1.png").write_bytes(b"no image")
    made.fill(on_bad_sample="skip")
    capsys.readouterr()
    made.stage_2(on_bad_sample="skip")
    assert "1 of 3 rows are skipped, as in stage 1" in capsys.readouterr().err


def test_a_dataset_that_moved_is_one_also_where_it_is_gone(made: Project) -> None:
    want = made.stage_2()
    made.data.rename(made.folder / "moved")
    made.flags["dataset_base_path"] = made.folder / "moved"
    made.fill()
    shutil.rmtree(made.folder / "moved")
    made.flags["dataset_base_path"] = None
    assert same(made.stage_2(), want)


# Links: what they lead to is compared, under the name that the metadata has.


def link_to_an_image(project: Project) -> Path:
    (project.data / "0.png").rename(project.data / "images.png")
    (project.data / "0.png").symlink_to("images.png")
    shutil.copy(project.data / "images.png", project.data / "others.png")
    another_image(project.data / "others.png")
    return project.data / "0.png"


def link_to_a_folder(project: Project) -> Path:
    (project.data / "images").mkdir()
    for path in list(project.data.glob("*.png")):
        path.rename(project.data / "images" / path.name)
    (project.data / "link").symlink_to("images")
    metadata = project.data / "metadata.json"
    rows = json.loads(metadata.read_text())
    metadata.write_text(
        json.dumps([{**row, "image": f"link/{row['image']}"} for row in rows])
    )
    shutil.copytree(project.data / "images", project.data / "others")
    another_image(project.data / "others/1.png")
    return project.data / "link"


def link_to_another_root(project: Project) -> Path:
    link = link_to_a_folder(project)
    link.unlink()
    for name in ("images", "others"):
        (project.folder / "roots").mkdir(exist_ok=True)
        (project.data / name).rename(project.folder / "roots" / name)
    link.symlink_to(project.folder / "roots/images")
    project.flags["dataset_root"] = (project.folder / "roots",)
    return link


def link_to_the_dataset_in_absolute_names(project: Project) -> Path:
    project.data.rename(project.folder / "images")
    shutil.copytree(project.folder / "images", project.folder / "others")
    another_image(project.folder / "others/1.png")
    project.data.symlink_to("images")
    for name in ("images", "others"):
        metadata = project.folder / name / "metadata.json"
        rows = json.loads(metadata.read_text())
        metadata.write_text(
            json.dumps(
                [{**row, "image": str(project.data / row["image"])} for row in rows]
            )
        )
    return project.data


LINKS = (
    link_to_an_image,
    link_to_a_folder,
    link_to_another_root,
    link_to_the_dataset_in_absolute_names,
)


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
@pytest.mark.parametrize("replaces", [True, False], ids=("elsewhere", "no link"))
@pytest.mark.parametrize("arrange", LINKS)
def test_what_a_link_leads_to_is_compared(
    arrange: Callable[[Project], Path], replaces: bool, made: Project
) -> None:
    link = arrange(made)
    made.fill()
    before = made.unsplit()
    assert same(made.stage_2(), before)
    others = link.readlink().with_name(link.readlink().name.replace("images", "others"))
    if replaces:
        link.unlink()
        link.symlink_to(others)
    else:
        found = link.parent / others
        link.unlink()
        found.rename(link)
    after = made.unsplit()
    assert not same(after, before)
    assert "is not what the feature cache" in made.refusal()
    made.fill()
    assert same(made.stage_2(), after)


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
def test_a_fetched_file_in_a_relative_folder_is_compared(
    made: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.folder)
    url = "https://example.org/0.png"
    name = f"{hashlib.sha256(url.encode()).hexdigest()}.png"
    (made.folder / "fetched").mkdir()
    (made.data / "0.png").rename(made.folder / "fetched" / name)
    metadata = made.data / "metadata.json"
    metadata.write_text(metadata.read_text().replace("0.png", url))
    made.flags["url_cache"] = Path("fetched")
    made.fill()
    assert same(made.stage_2(), made.unsplit())
    another_image(made.folder / "fetched" / name)
    assert f"{name}: is not what" in made.refusal()


# A run from the cache that resumes after stage 1 was run again.


def two_images(project: Project) -> None:
    another_image(project.data / "0.png")
    another_image(project.data / "2.png")


def nothing(project: Project) -> None:
    pass


RESUMED: Mapping[Callable[[Project], None], str] = MappingProxyType(
    {
        nothing: "",
        image_times: "",
        encoder_time: "",
        moved_folder: "",
        unit_formatting: "",
        two_images: "its cached values",
        encoder: "its cached values",
        unit_code: "its cached values",
        setting: "had different settings",
        caption: "its cached values",
    }
)
"""What changes before stage 1 runs again -> why the saved run is not resumed."""


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
@pytest.mark.parametrize("change", RESUMED, ids=lambda change: change.__name__)
def test_a_run_from_the_cache_resumes_with_the_values_that_it_began_with(
    change: Callable[[Project], None], made: Project
) -> None:
    flags = {"task": "sft:train", "feature_cache": made.folder / "cache"}
    out = made.folder / "resumed"
    train(made.folder, output_path=out, max_steps=2, **flags, **made.flags)
    change(made)
    made.fill()
    whole = made.stage_2(max_steps=4)
    again = {**flags, **made.flags, "max_steps": 4, "resume": "auto"}
    if RESUMED[change]:
        with pytest.raises(StateError, match=RESUMED[change]) as caught:
            train(made.folder, output_path=out, **again)
        assert caught.value.exit_code == 3
    else:
        found = outcome(train(made.folder, output_path=out, **again))
        last = "step-4.safetensors"
        assert same(found["files"][last], whole["files"][last])


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
def test_a_refused_resume_names_the_number_of_processes(made: Project) -> None:
    out = made.folder / "resumed"
    train(made.folder, output_path=out, max_steps=2, **made.flags)
    record = out / "logs/config.json"
    recorded = json.loads(record.read_text())
    assert recorded["versions"]["processes"] == "1"
    recorded["versions"]["processes"] = "4"
    record.write_text(json.dumps(recorded))
    with pytest.raises(StateError, match="processes: saved 4, this run 1"):
        train(
            made.folder,
            output_path=out,
            max_steps=4,
            batch_size=2,
            resume="auto",
            **made.flags,
        )


# A folder of frames is its frames, and what they are called.


def one_frame_more(folder: Path) -> None:
    shutil.copy(folder / "5.png", folder / "0.png")


def one_frame_less(folder: Path) -> None:
    (folder / "1.png").unlink()


def one_frame_at_another_place(folder: Path) -> None:
    (folder / "1.png").rename(folder / "9.png")


def a_hidden_file_more(folder: Path) -> None:
    (folder / ".index").write_text("of a file browser")


FRAMES = (one_frame_more, one_frame_less, one_frame_at_another_place)


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
@pytest.mark.parametrize("change", [*FRAMES, a_hidden_file_more])
def test_the_frames_of_a_folder_are_compared(
    change: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data/walk"
    folder.mkdir(parents=True)
    for number in range(1, 8):
        Image.new("RGB", (32, 32), (30 * number, 0, 0)).save(folder / f"{number}.png")
    rows = [{"video": "walk", "prompt": "a walk"}]
    (tmp_path / "data/metadata.json").write_text(json.dumps(rows))
    words = [
        *("--model", "wan", "--variant", "t2v", "--toy", "--num_frames", "5"),
        *("--dataset_base_path", "data", "--feature_cache", "cache"),
        *("--lora_rank", "1", "--max_steps", "1", "--output_path", "out"),
    ]
    assert main([*words, "--task", "sft:data_process"]) == 0
    change(folder)
    refused = change in FRAMES
    assert main([*words, "--task", "sft:train"]) == (3 if refused else 0)
    assert ("data/walk" in capfd.readouterr().err) == refused


# Files: what is there is compared, what is gone is passed over.


def rewrite(path: Path) -> None:
    """Change one byte of a file, and keep its size and time."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    """Put another file of equal size in the place of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)
    os.utime(path, (1, 1))


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


def touched(path: Path) -> None:
    os.utime(path, (1, 1))


def copied(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    shutil.copy(path.with_suffix(".old"), path)
    path.with_suffix(".old").unlink()


def gone(path: Path) -> None:
    path.unlink()


FILES = (
    "data/0.png",
    "model/vae/model-1-of-1.safetensors",
    "model/text_encoder/model-1-of-1.safetensors",
    "model/tokenizer/vocabulary.json",
)
CHANGES = (
    (rewrite, True),
    (replaced, True),
    (longer, True),
    (touched, False),
    (copied, False),
    (gone, False),
)
"""What is done to a file, and whether stage 2 refuses it."""


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
@pytest.mark.parametrize("names_encoders", [True, False], ids=("named", "recorded"))
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case[0].__name__)
def test_a_file_that_is_there_is_compared(
    case: tuple[Callable[[Path], None], bool],
    file: str,
    names_encoders: bool,
    made: Project,
) -> None:
    want = made.stage_2()
    change, refuses = case
    weights = weights_of(made.folder / "model")
    named = list(weights.values()) if names_encoders else [weights["dit"]]
    flags = {"model_paths": json.dumps(named)}
    change(made.folder / file)
    if refuses:
        words = made.refusal(**flags)
        assert f"{made.folder / file}: is not what the feature cache" in words
        assert "--task sft:data_process" in words
    else:
        assert same(made.stage_2(**flags), want)


# The plan: what no file tells.


def unit_that_reads_more(project: Project) -> None:
    project.install(
        UNITS.replace("brightness: float,", "brightness: float, prompt: str = '',")
    )


def unit_of_another_version(project: Project) -> None:
    project.install(version=7)


def mode_of_a_column(project: Project) -> None:
    project.install(column={"mode": "L"})


def frame_rate_of_a_column(project: Project) -> None:
    project.install(column={"fps": 15.0})


def frame_multiple_of_a_column(project: Project) -> None:
    project.install(column={"frame_multiple": 4})


def frame_of_a_column(project: Project) -> None:
    project.install(column={"frame": "first"})


def another_column(project: Project) -> None:
    project.install(column={"name": "picture"})


def samples_of_one_batch(project: Project) -> None:
    project.install(column={"same_in_batch": True})


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
    (mode_of_a_column, "input input_image mode: cache RGB, this run L"),
    (frame_rate_of_a_column, "input input_image fps: cache 0.0, this run 15.0"),
    (frame_multiple_of_a_column, "input input_image frame_multiple: cache 0, this run 4"),
    (frame_of_a_column, "input input_image frame: cache , this run first"),
    (another_column, "input input_image name: cache image, this run picture"),
    (samples_of_one_batch, "input input_image same_in_batch: cache False, this run True"),
    (configuration_of_an_encoder, "vae: has another configuration than when the feature cache was filled: eps"),
    (another_set_of_files, "model-1-of-2.safetensors: is not what the feature cache"),
)  # fmt: skip


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
@pytest.mark.parametrize("case", PLANS, ids=lambda case: case[0].__name__)
def test_what_stage_2_can_know_of_the_plan_is_compared(
    case: tuple[Callable[[Project], None], str], made: Project
) -> None:
    change, words = case
    assert made.stage_2()
    change(made)
    assert words in made.refusal()


IDS = (
    ("Tiny/Other:vae/*.safetensors", "was filled with vae of Tiny/Tiny, and this run names Tiny/Other"),
    ("Tiny/Tiny@v2:vae/*.safetensors", "was filled with text_encoder of Tiny/Tiny, and this run names Tiny/Tiny@v2"),
    ("Tiny/Tiny:vae/*.safetensors", ""),
    ("", ""),
)  # fmt: skip
"""How stage 2 names the encoder of images, and why it is refused. A revision holds for
all files of a model.
"""


@pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
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
