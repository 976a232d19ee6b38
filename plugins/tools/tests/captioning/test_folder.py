"""What is captioned is what a dataset of the folder would miss a caption of."""

import os
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain_tools.captioning.folder import find_tasks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Empty files, which are not looked into: the endings of their names tell."""
    for name in ("a.png", "b.jpg", "below/c.MP4", "note.md", ".hidden.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return tmp_path


def names(folder: Path, overwrite: bool = False) -> list[str]:
    return [task.name for task in find_tasks(folder, overwrite).tasks]


def test_images_and_videos_are_found_in_all_folders(folder: Path) -> None:
    tasks = find_tasks(folder, overwrite=False).tasks
    assert [(task.name, task.is_video) for task in tasks] == [
        ("a.png", False),
        ("b.jpg", False),
        ("below/c.MP4", True),
    ]
    assert tasks[2].output == folder / "below/c.txt"


@pytest.mark.parametrize("ending", (".txt", ".caption"))
def test_a_caption_is_kept_unless_it_is_to_be_replaced(
    folder: Path, ending: str
) -> None:
    (folder / f"a{ending}").write_text("a cat\n")
    found = find_tasks(folder, overwrite=False)
    assert (names(folder), found.captioned) == (["b.jpg", "below/c.MP4"], 1)
    replaced = find_tasks(folder, overwrite=True)
    # In the same file: two captions of one image would be refused.
    assert replaced.tasks[0].output == folder / f"a{ending}"
    assert replaced.captioned == 0


@pytest.mark.parametrize("overwrite", (False, True))
def test_a_caption_that_cannot_be_written_is_known_before(
    folder: Path, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.txt").mkdir()
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: path.name != "below" and real(path, mode)
    )
    found = find_tasks(folder, overwrite)
    assert [task.name for task in found.tasks] == ["b.jpg"]
    assert found.faults == {
        "a.png": "its caption would be a.txt, which is a folder: move it away",
        "below/c.MP4": "is in a folder that you may not write to",
    }


def test_an_empty_file_is_no_caption(folder: Path) -> None:
    (folder / "a.txt").write_text(" \n")
    (folder / "b.json").write_text('{"camera": "x"}')
    assert names(folder) == ["a.png", "b.jpg", "below/c.MP4"]


def test_a_caption_in_json_counts_and_is_not_rewritten(folder: Path) -> None:
    (folder / "a.json").write_text('{"caption": "a cat", "camera": "x"}')
    assert find_tasks(folder, overwrite=False).captioned == 1
    found = find_tasks(folder, overwrite=True)
    assert found.faults == {"a.png": "has its caption in a.json: move it away"}


def test_images_that_would_share_a_caption_are_named(folder: Path) -> None:
    (folder / "a.webp").touch()
    found = find_tasks(folder, overwrite=False)
    assert set(found.faults) == {"a.png", "a.webp"}
    assert "has the same name as a.webp" in found.faults["a.png"]


def test_a_caption_that_cannot_be_read_is_named_and_may_be_replaced(
    folder: Path,
) -> None:
    (folder / "a.txt").write_bytes(b"caf\xe9")
    (folder / "b.txt").symlink_to("nowhere")
    found = find_tasks(folder, overwrite=False)
    assert "a.txt: is not UTF-8 text" in found.faults["a.png"]
    assert "b.txt: No such file" in found.faults["b.jpg"]
    assert find_tasks(folder, overwrite=True).faults == {}


def test_two_captions_are_named(folder: Path) -> None:
    for ending in (".txt", ".caption"):
        (folder / f"a{ending}").write_text("a cat")
    faults = find_tasks(folder, overwrite=True).faults
    assert "has two captions, in a.txt and a.caption" in faults["a.png"]


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.heic").touch()
    with pytest.raises(UsageError, match="has no image or video") as error:
        find_tasks(tmp_path, overwrite=False)
    assert "photo.heic" in str(error.value)


@pytest.mark.parametrize(
    ("name", "what"), (("absent", "does not exist"), ("file", "is not a folder"))
)
def test_what_is_no_folder_is_refused(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"{os.sep}{name}: {what}|{what}"):
        find_tasks(tmp_path / name, overwrite=False)
