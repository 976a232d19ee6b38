"""Files are compared with their records: only touched ones are read."""

import os
from pathlib import Path

import pytest
from dstrain.storage import Digests, recorded_files
from dstrain.storage.recorded_files import RecordedFile, first_changed


@pytest.fixture
def recorded(tmp_path: Path) -> list[RecordedFile]:
    """Ten recorded files."""
    digests = Digests(tmp_path / "digests.json")
    files = []
    for number in range(10):
        path = tmp_path / f"{number}.txt"
        path.write_text(f"content {number}")
        digests.of(path)
        files.append((str(path), digests.record(path)))
    return files


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were read."""
    read: list[str] = []

    def sha256(path: Path) -> str:
        read.append(path.name)
        return original(path)

    original = recorded_files.sha256
    monkeypatch.setattr(recorded_files, "sha256", sha256)
    return read


def test_files_as_recorded_are_not_read(
    recorded: list[RecordedFile], reads: list[str]
) -> None:
    assert first_changed(recorded) is None
    assert not reads


def test_a_record_is_of_the_content_whose_digest_was_used(tmp_path: Path) -> None:
    digests = Digests(tmp_path / "digests.json")
    path = tmp_path / "a.txt"
    path.write_text("used")
    digests.of(path)
    path.write_text("seen")
    assert first_changed([(str(path), digests.record(path))]) == str(path)


def test_a_touched_file_is_read_and_passes(
    recorded: list[RecordedFile], reads: list[str], tmp_path: Path
) -> None:
    os.utime(tmp_path / "3.txt", (1, 1))
    assert first_changed(recorded) is None
    assert reads == ["3.txt"]


def test_another_size_says_enough(
    recorded: list[RecordedFile], reads: list[str], tmp_path: Path
) -> None:
    (tmp_path / "4.txt").write_text("longer than it was")
    assert first_changed(recorded) == str(tmp_path / "4.txt")
    assert not reads


@pytest.mark.parametrize("keeps_time", [False, True])
def test_other_content_of_equal_size_is_found(
    recorded: list[RecordedFile], tmp_path: Path, keeps_time: bool
) -> None:
    path = tmp_path / "5.txt"
    before = path.stat()
    path.write_text("CONTENT 5")
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.utime(path, (1, 1))
    assert first_changed(recorded) == str(path)


def test_a_copy_that_keeps_the_time_is_not_read(
    recorded: list[RecordedFile], reads: list[str], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.txt"
    original = tmp_path / "6.txt"
    copy.write_bytes(original.read_bytes())
    before = original.stat()
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert first_changed([(str(copy), recorded[6][1])]) is None
    assert not reads


def test_what_is_gone_or_no_file_is_passed_over(
    recorded: list[RecordedFile], tmp_path: Path
) -> None:
    (tmp_path / "7.txt").unlink()
    (tmp_path / "8.txt").unlink()
    (tmp_path / "8.txt").mkdir()
    assert first_changed(recorded) is None


def test_several_parts_are_compared(
    recorded: list[RecordedFile], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recorded_files, "FILES_PER_TASK", 3)
    (tmp_path / "9.txt").write_text("changed")
    assert first_changed(recorded) == str(tmp_path / "9.txt")
