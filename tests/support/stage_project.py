"""A project that is trained in two stages and in a single run, and what changes in it
between the stages.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from dstrain import StateError
from dstrain.plugin import Column, Constant, versioned
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support import family
from tests.support.family import write, write_data
from tests.support.runs import CAPTIONS, outcome, train

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
        return self.folder / "data"

    @property
    def vae(self) -> Path:
        """The weights of the encoder of images."""
        return self.folder / "model/vae/model-1-of-1.safetensors"

    def install(
        self,
        source: str = UNITS,
        brightness: float = 1.0,
        version: int | None = None,
        column: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Install the variant with units of this source; without a version its module counts."""
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
        encode = module.encode_image
        if version is not None:
            encode = versioned(version)(encode)
        units = (family.encode_prompt, encode)
        spec = replace(family.BASE, units=units, inputs=inputs)
        self.patch.setitem(family.PIPELINES, "base", spec)

    def fill(self, **flags: Any) -> None:
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


def filled_project(folder: Path, patch: pytest.MonkeyPatch) -> Project:
    """Return a project whose cache is filled."""
    project = Project(folder, patch)
    write(folder / "model")
    write_data(project.data, CAPTIONS[:3], ((16, 16), (16, 24)))
    project.install()
    project.fill()
    return project


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


def image_times(project: Project) -> None:
    for path in project.data.iterdir():
        os.utime(path, (1, 1))


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
