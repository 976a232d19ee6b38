"""The family of docs/plugins/writing-a-plugin.md keeps the contract, and its page
names every test of the kit.
"""

import re
import sys
from pathlib import Path

import pytest
from dstrain.cli.main import main
from dstrain.testing import Conformance
from dstrain.testing.__main__ import write as write_golden

from tests.support import ROOT

PAGE = ROOT / "docs/plugins/writing-a-plugin.md"
FILE = re.compile(r"^```python file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Outcomes:
    """A pytest plugin that counts how tests end."""

    def __init__(self) -> None:
        self.count = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.count[report.outcome] += 1


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's package, as installed: written by `dstrain plugins new`, its files
    replaced by the page's.
    """
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "auraflow"]) == 0
    folder = tmp_path / "auraflow"
    (folder / "dstrain_auraflow/networks.py").unlink()
    (folder / "tests/digests.json").unlink()
    for place, text in FILE.findall(PAGE.read_text()):
        (tmp_path / place).write_text(text)
    info = folder / "plugin_auraflow-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: plugin-auraflow\nVersion: 0.1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[dstrain.models]\nauraflow = dstrain_auraflow:MODEL\n"
    )
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.slow
def test_the_family_of_the_page_passes_the_kit_and_generates(package: Path) -> None:
    write_golden("auraflow", package / "tests")
    outcomes = Outcomes()
    pytest.main(
        [
            "-q",
            "-p",
            "no:cacheprovider",
            "--import-mode=importlib",
            str(package / "tests"),
        ],
        plugins=[outcomes],
    )
    assert outcomes.count["failed"] == outcomes.count["skipped"] == 0
    assert outcomes.count["passed"] > 30
    words = [
        "--toy",
        "--prompt",
        "a dog",
        "--height",
        "32",
        "--width",
        "32",
        "--num_inference_steps",
        "2",
    ]
    assert main(["generate", "--model", "auraflow", *words, "--output", "x.png"]) == 0
    for name in tuple(sys.modules):
        if name.startswith("dstrain_auraflow"):
            del sys.modules[name]


def test_every_test_of_the_kit_is_on_the_page_and_no_other() -> None:
    table = (
        PAGE.read_text()
        .partition("| test | holds the family to |")[2]
        .partition("\n\n")[0]
    )
    told = re.findall(r"`(\w+)`", table)
    assert sorted(told) == sorted(
        name.removeprefix("test_")
        for name in dir(Conformance)
        if name.startswith("test_")
    )


def test_every_module_of_the_template_is_on_the_page_or_left_out_by_it(
    package: Path,
) -> None:
    shown = {Path(place).name for place, _ in FILE.findall(PAGE.read_text())}
    modules = {path.name for path in package.rglob("*.py")}
    assert shown == modules
