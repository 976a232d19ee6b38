"""A fault of the machine is never taken for a bad row."""

import builtins
import errno
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain import OutOfMemory, SystemFault, UsageError, run
from dstrain.data import load_image, probe, read_frames, read_size
from dstrain.data.damage.faults import (
    check_readable,
    is_link_loop,
    raise_system_fault,
)
from dstrain.data.images import frame_durations

from tests.support.runs import config, project
from tests.support.videos import film, steady

NUMBERS = (
    *("EMFILE", "ENFILE", "ENOMEM", "EIO", "ESTALE", "EACCES", "ENODEV", "ENXIO"),
    *("ETIMEDOUT", "EHOSTDOWN", "ENOTCONN", "EREMOTEIO", "ENOSPC"),
)
"""Thirteen faults of a machine, by the names of their numbers."""
READERS: dict[str, Callable[[Path], object]] = {
    "its size": read_size,
    "its pixels": lambda path: load_image(path, "RGB", None),
    "its durations": frame_durations,
}


class FailingFile(io.BytesIO):
    """A file whose disk fails after the first bytes were read."""

    def __init__(self, data: bytes, number: int, after: int) -> None:
        super().__init__(data)
        self.number = number
        self.after = after

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell() >= self.after:
            raise OSError(self.number, "the disk failed")
        return super().read(size)


def fail_at(
    path: Path,
    error: Callable[[], BaseException],
    monkeypatch: pytest.MonkeyPatch,
    allowed: int = 0,
) -> None:
    """Let a file fail to open from the call after `allowed` on."""
    real = builtins.open
    calls: list[Any] = []

    def opened(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file) == str(path):
            calls.append(file)
            if len(calls) > allowed:
                raise error()
        return real(file, *arguments, **options)

    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(io, "open", opened)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return project(tmp_path) / "data/0.png"


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("reader", READERS)
def test_an_image_that_the_machine_cannot_open_is_no_bad_image(
    reader: str, name: str, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = getattr(errno, name)
    fail_at(image, lambda: OSError(number, "injected"), monkeypatch)
    with pytest.raises(
        SystemFault, match=r"injected\n.*a fault of the machine"
    ) as caught:
        READERS[reader](image)
    assert caught.value.where == str(image)


@pytest.mark.parametrize("reader", READERS)
def test_an_image_for_which_there_is_no_memory_is_no_bad_image(
    reader: str, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(image, MemoryError, monkeypatch)
    with pytest.raises(OutOfMemory, match="--dataset_num_workers"):
        READERS[reader](image)


def test_a_disk_that_fails_in_the_middle_of_an_image_is_named(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = image.read_bytes()
    real = builtins.open

    def opened(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file) == str(image):
            return FailingFile(data, errno.EIO, len(data) // 2)
        return real(file, *arguments, **options)

    monkeypatch.setattr(builtins, "open", opened)
    with pytest.raises(SystemFault, match="the disk failed"):
        load_image(image, "RGB", None)


def test_a_file_without_permission_or_on_a_failing_disk_is_no_bad_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = film(tmp_path / "a.mp4", steady(20, 30))
    damaged = tmp_path / "b.mp4"
    damaged.write_bytes(path.read_bytes()[:400])
    with pytest.raises(UsageError, match="truncated"):
        probe(damaged)
    fail_at(damaged, lambda: OSError(errno.EIO, "injected"), monkeypatch)
    with pytest.raises(SystemFault, match="injected"):
        probe(damaged)
    assert probe(path).frames
    assert len(read_frames(path, [0], None)) == 1


@pytest.mark.parametrize("name", NUMBERS)
def test_no_row_is_skipped_for_a_fault_of_the_machine(
    name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path)
    image = tmp_path / "data/3.png"
    number = getattr(errno, name)
    # The header is read before the pixels are decoded.
    fail_at(image, lambda: OSError(number, "injected"), monkeypatch, allowed=2)
    with pytest.raises(SystemFault, match="injected"):
        run(config(tmp_path, on_bad_sample="skip", max_steps=1))
    assert not list(tmp_path.rglob("bad_samples.jsonl"))


@pytest.mark.parametrize("name", ["ENOENT", "EISDIR", "ENAMETOOLONG", "EINVAL"])
def test_what_is_wrong_with_a_file_or_its_name_stays_the_files(name: str) -> None:
    raise_system_fault("a.png", OSError(getattr(errno, name), "injected"))
    raise_system_fault("a.png", OSError("image file is truncated"))
    raise_system_fault("a.png", ValueError("bad chunk"))


def test_a_file_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3 * 2**20))
    check_readable(tmp_path / "a")
    check_readable(tmp_path / "missing")


def test_only_a_link_that_leads_to_itself_is_one(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to("none")
    assert is_link_loop(tmp_path / "loop")
    assert not is_link_loop(tmp_path / "broken")
    assert not is_link_loop(tmp_path)
