"""The conformance kit passes a good family, and each of its tests sees a breach."""

import json
import re
import shutil
import sys
import tomllib
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import Frames, UsageError
from dstrain.data import DataConfig, Resolution, load_cell
from dstrain.data.row_checks import open_dataset
from dstrain.graph import FunctionSpec
from dstrain.plugin import Column, Constant, Measured, one_of, versioned
from dstrain.registry import ModelFamily, load_family, write_plugin
from dstrain.testing import Conformance, LoraFiles
from dstrain.testing.fingerprints import (
    changed,
    read_fingerprints,
    unit_fingerprints,
    write_fingerprints,
)
from dstrain.testing.rows import inputs, least_sizes, usual_size, write_rows
from PIL import Image

from tests.support.fixtures import write_distribution
from tests.support.forks import run_python

Change = tuple[str, str, str]
"""A file of the package, what stands in it, and what stands there instead."""
AGREES = """    @staticmethod
    def published(pipe, folder, arguments):
        latents = []
        made = pipe(**arguments, on_step=lambda i, now: latents.append(now))
        return latents, made

    family"""
BREACHES: list[tuple[str, tuple[Change, ...]]] = [
    (
        one["test"],
        tuple((row["file"], row["old"], row["new"]) for row in one["changes"]),
    )
    for one in tomllib.loads(Path(__file__).with_name("breaches.toml").read_text())[
        "breach"
    ]
]
"""What a test of the kit is called, and changes to the template that it must see."""
TRAINED = (
    "dit_lora",
    "dit",
    "text_encoder",
    "text_encoder+dit_lora",
    "text_encoder_lora",
)
SCALED = (
    "units.py",
    "images_to_tensor([input_image])",
    "images_to_tensor([input_image])",
)


@dataclass
class Outcomes:
    """A pytest plugin that notes how each test ended, by its name."""

    failed: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            self.failed.add(name)
        elif report.when == "call" and report.passed:
            self.passed.add(name)


def install_family(name: str, site: Path, changes: tuple[Change, ...] = ()) -> Path:
    """Install a family of the template, with changes; return the folder of its tests."""
    made = site.parent / name
    write_plugin(name, made)
    (site / f"dstrain_{name}").symlink_to(made / f"dstrain_{name}")
    write_distribution(site, f"plugin-{name}", {name: f"dstrain_{name}:MODEL"})
    for place, old, new in changes:
        path = made / f"dstrain_{name}" / place
        text = path.read_text()
        assert old in text, (place, old)
        # The last one: a record's and a pipeline spec's closing bracket, a network's
        # last return.
        before, _, after = text.rpartition(old)
        path.write_text(before + new + after)
    return made / "tests"


def run_kit(tests: Path, only: str = "") -> Outcomes:
    outcomes = Outcomes()
    words = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(tests)]
    words += ["-k", only]
    pytest.main(words, plugins=[outcomes])
    for module, one in tuple(sys.modules.items()):
        if str(getattr(one, "__file__", "")).startswith(
            str(tests)
        ):  # the next family's has the same name
            del sys.modules[module]
    return outcomes


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path for families that are installed for one test."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def golden(tests: Path) -> dict[str, bytes]:
    files = [path for path in tests.rglob("*") if path.suffix in (".txt", ".json")]
    return {path.name: path.read_bytes() for path in files}


def write_golden(family: str, tests: Path) -> None:
    command = [sys.executable, "-m", "dstrain.testing", family, str(tests)]
    run_python(command, check=True)


def test_a_new_family_keeps_the_whole_contract(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = run_kit(install_family("fine", site))
    assert outcomes.failed == set()
    for name, _ in BREACHES:
        assert any(name in test for test in outcomes.passed) or "published" in name
    for trained in TRAINED:
        test = f"test_every_trained_parameter_gets_a_gradient[base-{trained}]"
        assert test in outcomes.passed
    times = re.findall(r"fine base: (\d+\.\d) CPU seconds", capsys.readouterr().out)
    assert len(times) == 1


def test_every_test_of_the_kit_has_a_breach_that_it_sees() -> None:
    tests = [name for name in dir(Conformance) if name.startswith("test_")]
    seen = {name for name in tests if any(breach in name for breach, _ in BREACHES)}
    assert seen == {*tests}


@pytest.mark.parametrize("number", range(len(BREACHES)))
def test_a_breach_is_seen(number: int, site: Path) -> None:
    name, changes = BREACHES[number]
    tests = install_family(f"broken_{number}", site, changes)
    assert any(name in test for test in run_kit(tests, name).failed)


def test_a_difference_of_one_bit_between_both_ways_to_train_is_seen(site: Path) -> None:
    nudge = "        ).float().nextafter(torch.rand(()))\n"
    tests = install_family(
        "nudged", site, (("units.py", "        ).float()\n", nudge),)
    )
    assert run_kit(tests, "split_equals_unsplit").failed


def test_a_family_equal_to_its_published_pipeline_passes(site: Path) -> None:
    """Here the published pipeline is the family's own."""
    published = (("../tests/test_conformance.py", "    family", AGREES),)
    tests = install_family("published", site, published)
    outcomes = run_kit(tests, "every_step_equals")
    assert (len(outcomes.passed), outcomes.failed) == (2, set())


def test_golden_files_stay_as_they_are_and_stale_plans_go(site: Path) -> None:
    tests = install_family("same", site)
    before = golden(tests)
    shutil.copy(tests / "plans/base-sft-dit.txt", tests / "plans/gone-sft-dit.txt")
    (tests / "plans/notes.md").write_text("mine")
    write_golden("same", tests)
    assert golden(tests) == before
    assert (tests / "plans/notes.md").exists()


@pytest.mark.parametrize(("factor", "is_same"), [("1.0002", True), ("0.99", False)])
def test_fingerprints_are_recorded_anew_only_where_values_differ_beyond_rounding(
    factor: str, is_same: bool, site: Path
) -> None:
    name = "scaled" if is_same else "darker"
    place, old, new = SCALED
    tests = install_family(name, site, ((place, old, f"{factor} * {new}"),))
    before = golden(tests)
    assert bool(run_kit(tests, "units_make_what_they_made").failed) != is_same
    write_golden(name, tests)
    assert (golden(tests) == before) == is_same
    recorded = json.loads((tests / "fingerprints.json").read_text())
    assert list(recorded) == list(json.loads(before["fingerprints.json"]))


class Parametrized:
    """The part of pytest's `Metafunc` that the kit uses."""

    def __init__(self, *names: str) -> None:
        self.fixturenames = names
        self.ids: list[str] = []

    def parametrize(
        self, names: Any, values: Any, ids: list[str] | None = None
    ) -> None:
        self.ids = values if ids is None else ids
        assert len(values) == len(self.ids)


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        ("", "base"),
        ("component", "base-dit base-text_encoder"),
        ("adapted", "base-dit base-text_encoder"),
        ("guided", "base-plain base-guided"),
        ("guided reference", ""),
        ("latents_reference", ""),
        ("trained", " ".join(f"base-{name}" for name in TRAINED)),
    ],
)
def test_a_test_is_of_what_the_family_has(names: str, ids: str, site: Path) -> None:
    install_family("fine", site)

    class OfFine(Conformance):
        family = "fine"

    found = Parametrized("variant", *names.split())
    OfFine().pytest_generate_tests(found)  # type: ignore[arg-type]  # a stand-in
    assert sorted(found.ids) == sorted(ids.split())
    OfFine.published = found  # type: ignore[assignment]  # it is not called
    OfFine().pytest_generate_tests(found)  # type: ignore[arg-type]  # a stand-in
    assert found.ids


def test_lora_files_are_tested_for_the_default_targets_of_each_component_and_the_familys_own(
    site: Path,
) -> None:
    install_family("fine", site)

    class OfFine(LoraFiles):
        family = "fine"
        targets = MappingProxyType({"one": ("to_q",)})
        readers = MappingProxyType({"dit": {}})

    found = Parametrized("case")
    OfFine().pytest_generate_tests(found)  # type: ignore[arg-type]  # a stand-in
    assert found.ids == [
        "base-dit-default",
        "base-dit-one",
        "base-text_encoder-default",
    ]


@pytest.fixture
def fine(site: Path) -> ModelFamily:
    install_family("fine", site)
    return load_family("fine")


def test_rows_are_made_for_columns_of_every_kind_and_lack_what_is_optional(
    fine: ModelFamily, tmp_path: Path
) -> None:
    more = {
        "film": Column("film", "video", multiple=24, frame_multiple=4, fps=16.0),
        "first": Column("film", "image", frame="first", multiple=24),
        "count": Measured("film", "frames"),
        "mask": Column("mask", "image", mode="L"),
        "layer": Column("layer", "image", mode="RGBA"),
        "pictures": Column("pictures", "images"),
        "words": Column("words", "texts"),
        "kind": Column("kind", check=one_of("canny", "depth")),
        "number": Column("number", "number"),
        "whole": Column("whole", "integer"),
        "area": Constant(64),
    }
    plain = fine.spec("base")
    spec = replace(plain, inputs={**plain.inputs, **more})
    assert astuple(usual_size(spec)) == (48, 48, 9)
    assert [astuple(size) for size in least_sizes(spec)] == [
        (24, 24, 1),
        (24, 48, 5),
        (48, 24, 9),
        (48, 72, 13),
    ]
    folder = write_rows(spec, tmp_path / "data")
    config = DataConfig(folder, None, None, Resolution(None, None, 2**20))
    rows = open_dataset(config, spec.inputs).rows
    lacking = {"first", "mask", "layer", "pictures", "number", "whole", "film", "count"}
    full = set(spec.inputs) - {"negative_prompt"}
    assert [set(row) for row in rows] == [full] * 3 + [full - lacking] * 2
    values = inputs(spec)
    for name, cell in rows[0].items():
        loaded, value = load_cell(cell), values[name]
        assert type(loaded) is type(value), name
        if isinstance(value, Frames):
            assert (loaded.pixels.shape, loaded.fps) == (value.pixels.shape, value.fps)
        elif isinstance(value, Image.Image):
            assert (loaded.mode, loaded.size) == (value.mode, value.size)
            assert name == "first" or loaded.tobytes() == value.tobytes()
        elif name == "pictures":
            pixels = [image.tobytes() for image in value]
            assert [image.tobytes() for image in loaded] == pixels
        else:
            assert loaded == value, name


def test_a_version_is_recorded_with_what_it_makes_once(tmp_path: Path) -> None:
    def made(version: int, value: float) -> dict[str, Any]:
        unit = versioned(version)(lambda: None)
        unit.__name__ = "encode"
        spec: Any = SimpleNamespace(units=[FunctionSpec.of(unit)], decoders=[])
        values = {"encode": {"x": torch.full((4,), value)}}
        return {"base": unit_fingerprints(spec, values)}

    write_fingerprints(tmp_path, made(1, 1.0))
    recorded = read_fingerprints(tmp_path)
    write_fingerprints(tmp_path, made(1, 1.0001))
    with pytest.raises(UsageError, match="encode"):
        write_fingerprints(tmp_path, made(1, 2.0))
    assert read_fingerprints(tmp_path) == recorded
    assert changed(recorded, made(2, 2.0)["base"], "base")
    write_fingerprints(tmp_path, made(2, 2.0))
    assert read_fingerprints(tmp_path) != recorded
