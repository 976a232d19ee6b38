"""The conformance kit passes a family that keeps the contract, and each of its tests
has a breach that it sees.
"""

import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from dstrain.registry import load_family
from dstrain.testing import Conformance, LoraFiles
from dstrain.testing.family_under_test import FamilyUnderTest

from tests.support.forks import run_python
from tests.support.kit import AGREES, BREACHES, OTHERS, fails, install_family, run_kit

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


def golden(tests: Path) -> dict[str, bytes]:
    """Return the plans and fingerprints of a family."""
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
    for name in BREACHES:
        assert any(name in test for test in outcomes.passed) or "published" in name
    for trained in TRAINED:
        test = f"test_every_trained_parameter_gets_a_gradient[base-{trained}]"
        assert test in outcomes.passed
    times = re.findall(r"fine base: (\d+\.\d) CPU seconds", capsys.readouterr().out)
    assert len(times) == 1


def test_every_test_of_the_kit_has_a_breach_that_it_sees() -> None:
    tests = [name for name in dir(Conformance) if name.startswith("test_")]
    seen = [sum(breach in name for breach in BREACHES) for name in tests]
    assert seen == [1] * len(tests)


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_seen(breach: str, site: Path) -> None:
    assert fails(breach, site)


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_each_reason_of_a_test_has_a_breach_that_it_sees(
    number: int, site: Path, tmp_path: Path
) -> None:
    name, changes = OTHERS[number]
    install_family(f"other_{number}", site, changes)

    class Other(Conformance):
        family = f"other_{number}"

    tested = FamilyUnderTest(load_family(Other.family), "base", tmp_path / "toy")
    given = {"tested": tested, "tmp_path": tmp_path, "guided": False}
    method = getattr(Other(), f"test_{name}")
    wanted = inspect.signature(method).parameters
    with pytest.raises(AssertionError):
        method(**{one: given[one] for one in wanted})


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


def test_golden_files_of_what_is_unchanged_stay_as_they_are_and_stale_plans_go(
    site: Path,
) -> None:
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
    OfFine().pytest_generate_tests(found)  # type: ignore[arg-type]
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
