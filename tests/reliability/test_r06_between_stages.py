"""What changed between the stages is recomputed, refused by name, or accepted: nothing is
used that a single run would not compute.
"""

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from dstrain.distributed.world import ProcessGroup
from dstrain.errors import StateError
from dstrain.graph.inputs import Column, Constant
from dstrain.graph.noise_schedule import FlowMatchSchedule
from dstrain.graph.spec import PipelineSpec
from dstrain.graph.task import Task
from dstrain.graph.unit import FunctionSpec, Unit
from dstrain.lora.layers import Trainables
from dstrain.runs.precompute import data_process
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.reliability.test_r10_split_equivalence import equal, run, write_program
from tests.support import family
from tests.support.family import write, write_data
from tests.support.programs import (
    INPUTS,
    NETS,
    WIDTH,
    Program,
    loss_body,
    predict_body,
    unit_body,
)
from tests.support.runs import CAPTIONS, outcome, same, train
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
    assert "values stored" in str(caught.value)


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
        self, source: str = UNITS, multiple: int = 8, brightness: float = 1.0
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
            "input_image": Column("image", "image", multiple=multiple),
            "brightness": Constant(brightness),
        }
        units = (family.encode_prompt, module.encode_image)
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
    project.install(multiple=16)


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
