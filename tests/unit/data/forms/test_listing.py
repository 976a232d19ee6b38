"""Images and videos of a folder are listed in one order, and its digest is that of what
it says.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.data.forms import list_media, listing
from dstrain.data.forms.captions import MAX_BYTES
from dstrain.data.forms.listing import IMAGES, folder_digest, has_media


def write(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        os.utime(path, ns=(10**18, 10**18))
    return folder


def test_the_order_is_that_of_the_bytes_of_relative_names(tmp_path: Path) -> None:
    names = ["Z.png", "a.png", "a-1.png", "a/b.png", "a/b/c.jpg", "é.webp", "a.b.png"]
    write(tmp_path, *names, ".hidden.png", ".git/x.png", "notes.txt", "a/readme.md")
    found = [medium.name for medium in list_media(tmp_path)]
    assert found == sorted(names, key=os.fsencode)


def test_each_has_its_captions_and_twins(tmp_path: Path) -> None:
    write(tmp_path, "x/a.png", "x/a.txt", "x/a.JSON", "x/a.caption", "x/a.b.txt")
    write(tmp_path, "b.png", "b.JPG", "b.mp4", "b.txt", "c.mp4")
    a, b, *_ = sorted(list_media(tmp_path, IMAGES), key=lambda one: -len(one.captions))
    assert a.name == "x/a.png"
    assert a.captions == ("x/a.txt", "x/a.caption", "x/a.JSON")
    assert b.captions == ("b.txt",)
    assert {b.name, *b.twins} == {"b.png", "b.JPG"}
    assert "c.mp4" in [medium.name for medium in list_media(tmp_path)]


def test_a_link_to_a_folder_is_refused_and_a_folder_without_media_has_none(
    tmp_path: Path,
) -> None:
    assert not has_media(write(tmp_path / "a", "x.txt"))
    assert has_media(write(tmp_path / "b", "deep/er/x.png"))
    (tmp_path / "b/around").symlink_to(tmp_path / "b")
    with pytest.raises(UsageError, match="around: is a link to a folder"):
        list(list_media(tmp_path / "b"))


def test_the_digest_is_of_names_and_captions_wherever_the_folder_is(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "a", "a.png", "a.txt", "b.png")
    digest = folder_digest(folder)
    assert folder_digest(folder) == digest
    shutil.copytree(folder, tmp_path / "copy")
    assert folder_digest(tmp_path / "copy") == digest
    write(folder, "notes.md")
    assert folder_digest(folder) == digest


@pytest.mark.parametrize("change", ["caption", "same size", "renamed", "added", "gone"])
def test_every_change_is_seen(tmp_path: Path, change: str) -> None:
    folder = write(tmp_path / "a", "a.png", "a.txt", "b.png", "b.txt")
    digest = folder_digest(folder)
    if change == "caption":
        (folder / "a.txt").write_text("another caption")
    elif change == "same size":
        (folder / "a.txt").write_text("A.txt")
        os.utime(folder / "a.txt", ns=(10**18, 10**18))
    elif change == "renamed":
        (folder / "b.png").rename(folder / "c.png")
    elif change == "added":
        write(folder, "c.png")
    else:
        (folder / "b.txt").unlink()
    assert folder_digest(folder) != digest


def test_captions_that_did_not_change_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "a", "a.png", "a.txt")
    # As if it had been written long ago.
    monkeypatch.setattr("dstrain.storage.hashing.SETTLED", -1)
    digest = folder_digest(folder)

    def refuse(path: Path, most_bytes: int) -> bytes:
        raise AssertionError("a caption is read")

    monkeypatch.setattr(listing, "read_limited", refuse)
    assert folder_digest(folder) == digest
    write(folder, "b.png")
    with pytest.raises(AssertionError):
        folder_digest(folder)


@pytest.mark.parametrize("kind", ["pipe", "device", "large", "link out"])
def test_what_is_no_caption_file_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = write(tmp_path / "data", "a.png")
    secret = write(tmp_path / "elsewhere", "secret.txt") / "secret.txt"
    caption = folder / "a.txt"
    if kind == "pipe":
        os.mkfifo(caption)
    elif kind == "device":
        caption.symlink_to("/dev/zero")
    elif kind == "large":
        with caption.open("wb") as file:
            file.truncate(MAX_BYTES + 1)
    else:
        caption.symlink_to(secret)
    opened = []
    real = Path.open

    def noting(path: Path, *given: Any, **named: Any) -> Any:
        opened.append(path.name)
        return real(path, *given, **named)

    monkeypatch.setattr(Path, "open", noting)
    digest = folder_digest(folder)
    assert "a.txt" not in opened
    if kind == "link out":
        known = folder_digest(folder, [tmp_path / "elsewhere"])
        assert known != digest
        caption.unlink()
        shutil.copy(secret, caption)
        assert folder_digest(folder) == known
