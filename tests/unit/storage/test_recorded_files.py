"""Files are compared with their records: only touched ones are read."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from dstrain.storage import Digests
from dstrain.storage.recorded_files import first_changed

from tests.support.unreadable import make_unreadable

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


def test_a_file_is_read_only_where_it_was_touched(
    recorded: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, original = tmp_path / "copy.txt", tmp_path / "6.txt"
    copy.write_bytes(original.read_bytes())
    before = original.stat()
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    copied = [(str(copy), recorded[6][1])]
    os.utime(tmp_path / "3.txt", (1, 1))
    assert first_changed(recorded) is None
    for path in (copy, tmp_path / "3.txt", tmp_path / "4.txt"):
        make_unreadable(monkeypatch, path, errno.EIO)
    # A copy that keeps the time is not read, and neither is what was not touched.
    assert first_changed([*copied, recorded[4]]) is None
    with pytest.raises(OSError):
        first_changed(recorded)
    # Another size says enough.
    os.truncate(tmp_path / "4.txt", 3)
    assert first_changed(recorded[4:]) == str(tmp_path / "4.txt")


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
