"""Dry runs of the family `tiny`, whose tables are read as their user does."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import run

from tests.support import family
from tests.support.runs import config, project

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
ROW = re.compile(r"^    (\S.*?)  +([\d.]+) ([KMG]iB)", re.MULTILINE)


def tables(page: str, title: str) -> list[dict[str, float]]:
    """The bytes in the tables with this title, by what needs them."""
    parts = re.split(rf"^{title}.*\n", page, flags=re.MULTILINE)[1:]
    return [
        {
            name: float(size) * UNITS[unit]
            for name, size, unit in ROW.findall(part.partition("\n\n")[0])
        }
        for part in parts
    ]


@dataclass(frozen=True)
class Printed:
    page: str

    @property
    def stages(self) -> list[dict[str, float]]:
        return tables(self.page, "memory of one device")

    @property
    def memory(self) -> dict[str, float]:
        """What a run of one stage, or that is not split, needs on its device."""
        (only,) = self.stages
        return only

    @property
    def sums(self) -> list[float]:
        """What is counted on the device, in each stage."""
        others = ("not counted", "peak", "RAM for weights", "RAM for what is sharded")
        return [
            sum(size for name, size in stage.items() if name not in others)
            for stage in self.stages
        ]

    @property
    def disk(self) -> dict[str, float]:
        """What is written."""
        return tables(self.page, "disk")[-1]

    @property
    def fits(self) -> bool | None:
        """Whether it fits on the device; None if that is not known."""
        answer = self.page.partition("\nwhether it fits")[2].splitlines()[1]
        return None if "not known" in answer else " not " not in answer


DryRun = Callable[..., Printed]


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str]) -> DryRun:
    """Return a function from a project and flags to what a dry run prints."""

    def printed(folder: Path, **flags: Any) -> Printed:
        planned = {"device_memory": "24", "mixed_precision": "no", **flags}
        run(config(folder, dry_run=True, **planned))
        return Printed(capsys.readouterr().out)

    return printed


@pytest.fixture(scope="module")
def deep(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project of networks so large that sizes are printed in three digits, and small
    enough that no size is a tenth of a MiB; the denoiser has four blocks.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("dit", "text_encoder"):
            patch.setitem(family.SIZES[name], "width", 24)
        spec = replace(family.BASE, denoiser_config={"depth": 4})
        patch.setitem(family.PIPELINES, "base", spec)
        yield project(tmp_path_factory.mktemp("deep"))
