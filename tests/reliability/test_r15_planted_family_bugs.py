"""R15: the conformance kit has teeth: each of twenty and more bugs, planted in each of the
three families that it can be in, fails a test of the kit that compares no plan and no
fingerprint.
"""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib import invalidate_caches
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.family_bugs import BUGS, Edit, FamilyBug
from tests.support.forks import in_clean_child
from tests.support.kit import Outcomes

TRIALS = [
    pytest.param(bug, family, edit, id=f"{bug.name}-{family}")
    for bug in BUGS
    for family, edit in bug.edits.items()
]


def test_twenty_bugs_and_more_can_be_planted_and_differ_in_kind() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 20
    assert Counter(bug.kind for bug in BUGS).keys() >= {
        "units", "model_fn", "guidance", "schedule", "columns", "key maps", "targets", "toys"
    }  # fmt: skip
    for bug in BUGS:
        for family, edit in bug.edits.items():
            text = (package(ROOT, family) / edit.file).read_text()
            assert text.count(edit.old) == 1, (bug.name, family)
            assert edit.new != edit.old


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], int]:
    """Return a function that counts the tests that fail without a bug."""

    @cache
    def failed(family: str, only: str) -> int:
        place = tmp_path_factory.mktemp("sound")
        return failed_in_child(copied(family, place), family, only)

    return failed


@pytest.mark.promise("R15", "the kit has teeth: planted bugs of families are caught")
@pytest.mark.parametrize(("bug", "family", "edit"), TRIALS)
def test_the_kit_catches_a_bug_of_a_family(
    bug: FamilyBug,
    family: str,
    edit: Edit,
    tmp_path: Path,
    sound: Callable[[str, str], int],
) -> None:
    only = f"{bug.seen_by} and {edit.variant}"
    copy = copied(family, tmp_path)
    path = package(tmp_path, family) / edit.file
    path.write_text(path.read_text().replace(edit.old, edit.new))
    assert failed_in_child(copy, family, only) > 0
    # A test that fails anyway would catch nothing.
    assert sound(family, only) == 0


def copied(family: str, place: Path) -> Path:
    """Copy a family's plugin below a folder."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    return shutil.copytree(
        ROOT / "plugins" / family, place / "plugins" / family, ignore=ignored
    )


def package(root: Path, family: str) -> Path:
    """The folder of a family's package."""
    return root / "plugins" / family / f"dstrain_{family}"


def failed_in_child(copy: Path, family: str, only: str) -> int:
    """Return how many of a copied family's tests of the kit fail, in a child that has not
    imported the family.
    """
    return in_clean_child(
        _failed, copy, family, only, log=copy.parent.parent / "child.log"
    )


def _failed(copy: Path, family: str, only: str) -> int:
    """Run the kit on the copy, and return how many tests failed; none may be left out."""
    assert f"dstrain_{family}" not in sys.modules
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    # As where it runs for the family's author; pytest says more there, which may take long.
    os.environ["CI"] = "true"
    invalidate_caches()
    outcomes = Outcomes()
    words = [
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--import-mode=importlib",
        f"--rootdir={copy}",
        f"--basetemp={copy.parent.parent / 'temporary'}",
        "-c",
        "/dev/null",
        str(copy / "tests/test_conformance.py"),
        "-k",
        only,
    ]
    code = pytest.main(words, plugins=[outcomes])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), code
    assert outcomes.failed or outcomes.passed
    return len(outcomes.failed)
