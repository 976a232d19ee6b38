"""Golden files are written as they are, and stale ones are removed."""

import shutil
from pathlib import Path

from dstrain.testing.__main__ import write as write_golden

from tests.support.kit import install_family


def test_golden_files_of_what_is_unchanged_are_written_as_they_are_and_stale_plans_go(
    site: Path,
) -> None:
    tests = install_family("same", site)
    before = {
        path.name: path.read_bytes()
        for path in tests.rglob("*")
        if path.suffix in (".txt", ".json")
    }
    shutil.copy(tests / "plans/base-sft-dit.txt", tests / "plans/gone-sft-dit.txt")
    write_golden("same", tests)
    assert {
        path.name: path.read_bytes()
        for path in tests.rglob("*")
        if path.suffix in (".txt", ".json")
    } == before
