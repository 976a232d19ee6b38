"""Files are found in the dataset's folders and nowhere else."""

from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.data import Dataset
from dstrain.plugin import Column
from PIL import Image

from tests.support.datasets import bad_cells, faults, open_rows
from tests.support.family import write_data
from tests.support.runs import train

IMAGE = {"image": Column("image", "image", multiple=8)}
Folders = tuple[Path, ...]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Three folders: one.png, two.png, three.png in each; both.png in the last two."""
    found = tmp_path / "base", tmp_path / "second", tmp_path / "third"
    names = (("one",), ("two", "both"), ("three", "both"))
    for folder, own in zip(found, names, strict=True):
        folder.mkdir()
        for name in own:
            Image.new("RGB", (16, 16), "red").save(folder / f"{name}.png")
    return found


def opened(folders: Folders, *names: str) -> Dataset:
    rows = [{"image": name} for name in names]
    return open_rows(folders[0], rows, IMAGE, roots=folders[1:])


def places(folders: Folders, *names: str) -> list[str]:
    return [cells["image"].files[0] for cells in opened(folders, *names).rows]


def reasons(folders: Folders, *names: str) -> list[str]:
    """What is wrong with each name."""
    rows = [{"image": name} for name in names]
    found = bad_cells(folders[0], rows, IMAGE, roots=folders[1:])
    wanted = [f"metadata.json:{row}:image" for row in range(1, len(rows) + 1)]
    assert list(found) == wanted
    return list(found.values())


def test_names_are_looked_for_in_every_folder(folders: Folders) -> None:
    names = ("one.png", "two.png", "three.png")
    paths = zip(folders, names, strict=True)
    wanted = [str(folder / name) for folder, name in paths]
    assert places(folders, *names) == wanted
    # Absolute ones inside any of them.
    assert places(folders, *wanted) == wanted
    (reason,) = reasons(folders[:2], wanted[2])
    assert reason.count("three.png") == 1
    assert f"--dataset_root {folders[2]} " in reason


def test_backslashes_part_folders_unless_a_file_has_them(folders: Folders) -> None:
    """A table written on Windows is read elsewhere."""
    (folders[0] / "sub/deep").mkdir(parents=True)
    image = (folders[0] / "one.png").read_bytes()
    below = folders[0] / "sub/deep/a.png"
    below.write_bytes(image)
    found = places(folders, "sub\\deep\\a.png", ".\\sub\\deep/a.png")
    assert found == [str(below)] * 2
    literal = folders[1] / "sub\\deep\\a.png"
    literal.write_bytes(image)
    assert places(folders, "sub\\deep\\a.png") == [str(literal)]
    (reason,) = reasons(folders, "..\\second\\..\\..\\one.png")
    assert str(folders[0].parent.parent / "one.png") in reason


@pytest.mark.parametrize("here", ["caf\u00e9.png", "cafe\u0301.png"])
def test_a_name_has_its_accents_joined_or_apart(here: str, folders: Folders) -> None:
    """As one typed in a table and one in an archive of another system."""
    path = folders[0] / here
    path.write_bytes((folders[0] / "one.png").read_bytes())
    assert places(folders, "caf\u00e9.png", "cafe\u0301.png") == [str(path)] * 2


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("ONE.PNG", "one.png"),
        ("base/one.png", "one.png"),
        ("a/b/ONE.png", "one.png"),
        ("{}/pictures/Two.png", "two.png"),
        ("sub/Cafe\u0301.png", "sub/caf\u00e9.png"),
        ("one.png/", "one.png"),
        ("C:\\pictures\\One.png", "one.png"),
        ("other.png", ""),
        ("out/secret.PNG", ""),
    ],
)
def test_a_file_that_is_there_under_a_name_like_it_is_suggested(
    folders: Folders, tmp_path: Path, written: str, meant: str
) -> None:
    image = (folders[0] / "one.png").read_bytes()
    (folders[0] / "sub").mkdir()
    (folders[0] / "sub/caf\u00e9.png").write_bytes(image)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret.png").touch()
    (folders[0] / "out").symlink_to(tmp_path / "elsewhere")
    (reason,) = reasons(folders, written.format(folders[2]))
    assert (f"{meant!r}?" in reason) is bool(meant)
    assert "secret.png" not in reason


def test_a_name_found_in_two_folders_is_refused_naming_both(folders: Folders) -> None:
    (reason,) = reasons(folders, "both.png")
    assert f"{folders[1]}/both.png and {folders[2]}/both.png" in reason


def test_one_file_seen_from_two_folders_is_one(folders: Folders) -> None:
    (folders[1] / "one.png").symlink_to(folders[0] / "one.png")
    assert places(folders, "one.png") == [str(folders[0] / "one.png")]
    nested = (*folders, folders[1].parent / "second")
    assert places(nested, "two.png") == [str(folders[1] / "two.png")]


def test_a_link_leads_from_one_folder_to_another_alone(folders: Folders) -> None:
    (folders[0] / "link.png").symlink_to(folders[1] / "two.png")
    assert places(folders, "link.png") == [str(folders[0] / "link.png")]
    (folders[0] / "loop.png").symlink_to("loop.png")
    (folders[0] / "gone.png").symlink_to("none.png")
    out, loop, gone = reasons(folders[:1], "link.png", "loop.png", "gone.png")
    assert str(folders[1] / "two.png") in out
    # What it says allows it; nothing is said of folders that are not there.
    assert f"--dataset_root {folders[1]} " in out
    (absent,) = reasons(folders[:1], str(folders[1].parent / "none/two.png"))
    assert "--dataset_root" not in absent
    assert loop.replace("loop", "gone") == gone


@pytest.mark.usefixtures("tiny")
def test_a_run_looks_for_files_in_all_the_roots_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data", ("a", "b"))
    roots = tmp_path / "more", tmp_path / "else"
    for number, root in enumerate(roots):
        root.mkdir()
        (tmp_path / f"data/{number}.png").rename(root / f"{number}.png")
    with pytest.raises(UsageError) as caught:
        train(tmp_path, toy=True, dataset_root=roots[:1])
    assert list(faults(caught.value)) == ["metadata.json:2:image"]
    train(tmp_path, toy=True, dataset_root=roots, dry_run=True)
    assert "0.png" not in capsys.readouterr().out
    train(tmp_path, toy=True, dataset_root=roots)
