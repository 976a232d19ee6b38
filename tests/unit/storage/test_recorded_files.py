"""Files are compared with their records: only touched ones are read."""

import os
from pathlib import Path
from typing import Any

import pytest
from dstrain.storage import Digests
from dstrain.storage.recorded_files import first_changed

COUNT = 600
"""More than one thread looks at."""


@pytest.fixture
def recorded(tmp_path: Path) -> list[tuple[str, list[Any]]]:
    """Recorded files."""
    digests = Digests(tmp_path / "digests.json")
    paths = [tmp_path / f"{number}.txt" for number in range(COUNT)]
    for number, path in enumerate(paths):
        path.write_text(f"content {number}")
        digests.of(path)
    return [(str(path), digests.record(path)) for path in paths]


Files = list[tuple[str, list[Any]]]


def test_a_record_is_of_the_content_whose_digest_was_used(tmp_path: Path) -> None:
    digests = Digests(tmp_path / "digests.json")
    path = tmp_path / "a.txt"
    path.write_text("used")
    digests.of(path)
    path.write_text("seen")
    assert first_changed([(str(path), digests.record(path))]) == str(path)


@pytest.mark.parametrize("keeps_time", [False, True])
def test_other_content_of_equal_size_is_found(
    recorded: Files, tmp_path: Path, keeps_time: bool
) -> None:
    path = tmp_path / f"{COUNT - 1}.txt"
    before = path.stat()
    path.write_text(f"CONTENT {COUNT - 1}")
    times = (before.st_atime_ns, before.st_mtime_ns) if keeps_time else (1, 1)
    os.utime(path, ns=times)
    assert first_changed(recorded) == str(path)
    # What is gone or no file is passed over.
    path.unlink()
    (tmp_path / "8.txt").unlink()
    (tmp_path / "8.txt").mkdir()
    assert first_changed(recorded) is None
    (tmp_path / "9.txt").write_text("other")
    assert first_changed(recorded) == str(tmp_path / "9.txt")
