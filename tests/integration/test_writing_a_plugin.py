"""The families of the tutorials keep the contract, and the first page names every test
of the kit.
"""

import csv
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.cli.main import main
from dstrain.testing import Conformance
from dstrain.testing.__main__ import write as write_golden
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from tests.support import ROOT
from tests.support.family import write_data
from tests.support.fixtures import write_distribution

FILE = re.compile(r"^```python file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Tutorial:
    """A page that makes a family."""

    page: Path
    family: str
    arguments: tuple[str, ...]
    """Those of `dstrain generate`."""

    @property
    def files(self) -> list[tuple[str, str]]:
        """The files that the page shows: path and text."""
        return FILE.findall(self.page.read_text())


FIRST = Tutorial(
    ROOT / "docs/plugins/writing-a-plugin.md", "auraflow", ("--output", "x.png")
)
VIDEO = Tutorial(
    ROOT / "docs/plugins/video-family.md",
    "ltx_video",
    ("--num_frames", "9", "--input", "fps=8", "--output", "x.mp4"),
)
NOISE = Tutorial(
    ROOT / "docs/plugins/diffusion-family.md", "pixart", ("--output", "x.png")
)


class Outcomes:
    """A pytest plugin that counts how tests end."""

    def __init__(self) -> None:
        self.count = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.count[report.outcome] += 1


@pytest.fixture(params=(FIRST, VIDEO, NOISE), ids=lambda tutorial: tutorial.family)
def tutorial(request: pytest.FixtureRequest) -> Tutorial:
    found: Tutorial = request.param
    return found


@pytest.fixture
def package(
    tutorial: Tutorial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The page's package, as installed: written by `dstrain plugins new`, its files
    replaced by the page's.
    """
    name = tutorial.family
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", name]) == 0
    folder = tmp_path / name
    (folder / f"dstrain_{name}/networks.py").unlink()
    (folder / "tests/fingerprints.json").unlink()
    for place, text in tutorial.files:
        (tmp_path / place).write_text(text)
    distribution = "plugin-" + name.replace("_", "-")
    write_distribution(folder, distribution, {name: f"dstrain_{name}:MODEL"})
    monkeypatch.syspath_prepend(folder)
    yield folder
    for module, loaded in tuple(sys.modules.items()):
        # Also its tests, whose module has the same name in every package.
        if str(getattr(loaded, "__file__", None)).startswith(str(folder)):
            del sys.modules[module]


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # diffusers, numpy 2
def test_the_family_of_the_page_passes_the_kit_and_generates(
    tutorial: Tutorial, package: Path
) -> None:
    write_golden(tutorial.family, package / "tests")
    outcomes = Outcomes()
    arguments = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    pytest.main([*arguments, str(package / "tests")], plugins=[outcomes])
    assert outcomes.count["failed"] == outcomes.count["skipped"] == 0
    assert outcomes.count["passed"] > 30
    words = ["generate", "--toy", "--height", "32", "--width", "32"]
    words += ["--num_inference_steps", "2"]
    words += ["--model", tutorial.family, "--prompt", "a dog", *tutorial.arguments]
    assert main(words) == 0


def losses(run: Path) -> list[float]:
    with (run / "logs/loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
@pytest.mark.parametrize("tutorial", [NOISE], indirect=True)
def test_a_family_that_predicts_noise_logs_and_minimizes_the_objective_of_ddpm(
    package: Path, tmp_path: Path
) -> None:
    """Of a mixture by diffusers' scheduler, the mean square error of the noise in it."""
    write_data(tmp_path / "data", ("a dog", "a cat"), ((32, 32),))
    seen: list[tuple[Tensor, ...]] = []
    slopes: list[Tensor] = []

    def watch(layer: Any, given: Any, options: Any, out: Any) -> None:
        name = type(layer).__name__
        if name == "PixArtTransformer2DModel":
            seen.append((clean[-1], given[0], options["timestep"], out[0].detach()))
            out[0].register_hook(slopes.append)
        if name == "Conv2d" and layer.kernel_size == (1, 1) and len(out[0]) == 8:
            clean.append(out.chunk(2, 1)[0] * 0.13025)

    clean: list[Tensor] = []
    handle = register_module_forward_hook(watch, with_kwargs=True)
    words = ["--model", "pixart", "--toy", "--mixed_precision", "no"]
    words += ["--dataset_base_path", str(tmp_path / "data"), "--output_path"]
    assert main([*words, str(tmp_path / "out"), "--max_steps", "8"]) == 0
    handle.remove()
    for more in (["--max_steps", "4"], ["--max_steps", "8", "--resume"]):
        assert main([*words, str(tmp_path / "again"), *more]) == 0
    # As the run left the library: without what is optional to it.
    scheduler = import_module("diffusers").DDPMScheduler(
        beta_start=0.0001, beta_end=0.02
    )
    logged, again = losses(tmp_path / "out"), losses(tmp_path / "again")
    assert logged == again
    for (data, noisy, timestep, out), slope, loss in zip(
        seen, slopes, logged, strict=True
    ):
        kept = scheduler.alphas_cumprod[timestep.long()].double()
        noise = (noisy - kept.sqrt() * data) / (1 - kept).sqrt()
        error = out.chunk(2, 1)[0] - noise
        assert loss == pytest.approx(float(error.square().mean()), 1e-5)
        wanted = torch.cat([2 * error / error.numel(), torch.zeros_like(error)], 1)
        torch.testing.assert_close(slope.double(), wanted, rtol=1e-5, atol=1e-7)


def test_every_test_of_the_kit_is_on_the_page_and_no_other() -> None:
    table = (
        FIRST.page.read_text()
        .partition("| test | what it checks |")[2]
        .partition("\n\n")[0]
    )
    printed = re.findall(r"`(\w+)`", table)
    assert sorted(printed) == sorted(
        name.removeprefix("test_")
        for name in dir(Conformance)
        if name.startswith("test_")
    )


def test_every_module_of_the_template_is_on_the_page_or_left_out_by_it(
    tutorial: Tutorial, package: Path
) -> None:
    shown = {Path(place).name for place, _ in tutorial.files}
    modules = {path.name for path in package.rglob("*.py")}
    assert shown == modules


def test_families_import_the_public_modules_alone(tutorial: Tutorial) -> None:
    imported = {
        name
        for _, text in tutorial.files
        for name in re.findall(r"^from (dstrain[\w.]*) import", text, re.MULTILINE)
        if not name.startswith(f"dstrain_{tutorial.family}")
    }
    assert imported <= {
        "dstrain",
        "dstrain.plugin",
        "dstrain.plugin.functional",
        "dstrain.plugin.noise",
        "dstrain.testing",
    }
