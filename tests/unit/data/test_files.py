"""Files are found in the dataset's folders and nowhere else, or fetched."""

import json
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.cli.main import main
from dstrain.data import DataConfig, Dataset, Resolution, files, open_dataset
from dstrain.data.files import DataRoots, FileInspector
from dstrain.plugin import Column
from PIL import Image

from tests.support.family import write_data

IMAGE = {"image": Column("image", "image", multiple=8)}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Three folders: one.png, two.png and three.png, each in its own; both.png in the
    last two.
    """
    found = tmp_path / "base", tmp_path / "second", tmp_path / "third"
    for folder, names in zip(
        found, (("one",), ("two", "both"), ("three", "both")), strict=True
    ):
        folder.mkdir()
        for name in names:
            Image.new("RGB", (16, 16), "red").save(folder / f"{name}.png")
    return found


def opened(folders: tuple[Path, ...], *names: str) -> Dataset:
    base, *roots = folders
    (base / "metadata.json").write_text(json.dumps([{"image": name} for name in names]))
    return open_dataset(
        DataConfig(base, None, None, Resolution(None, None, 2**20), roots=tuple(roots)),
        IMAGE,
    )


def places(folders: tuple[Path, ...], *names: str) -> list[str]:
    return [cells["image"].files[0] for cells in opened(folders, *names).rows]


def test_names_are_looked_for_in_every_folder(folders: tuple[Path, ...]) -> None:
    wanted = [
        str(folder / f"{name}.png")
        for folder, name in zip(folders, ("one", "two", "three"), strict=True)
    ]
    assert places(folders, "one.png", "two.png", "three.png") == wanted


def test_backslashes_part_folders_where_no_file_has_them_in_its_name(
    folders: tuple[Path, ...],
) -> None:
    """A table written on Windows is read elsewhere."""
    (folders[0] / "sub/deep").mkdir(parents=True)
    image = (folders[0] / "one.png").read_bytes()
    (folders[0] / "sub/deep/a.png").write_bytes(image)
    below = str(folders[0] / "sub/deep/a.png")
    assert places(folders, "sub\\deep\\a.png", ".\\sub\\deep/a.png") == [
        below,
        str(folders[0] / "./sub/deep/a.png"),
    ]
    literal = folders[1] / "sub\\deep\\a.png"
    literal.write_bytes(image)
    assert places(folders, "sub\\deep\\a.png") == [str(literal)]
    roots = DataRoots.of(folders[0], (), None)
    assert not roots.lacks("sub\\deep\\a.png")
    assert roots.lacks("sub\\deep\\b.png")
    with pytest.raises(UsageError, match="points outside"):
        places(folders, "..\\one.png")


@pytest.mark.parametrize(
    ("written", "advice"),
    [
        ("C:\\pictures\\x.png", ", a path of Windows: write it relative"),
        ("D:/pictures/x.png", ", a path of Windows: write it relative"),
        ("C:\\pictures\\One.png", "; did you mean 'one.png'?"),
        ("c:x.png", ""),
    ],
)
def test_a_path_with_a_drive_is_called_what_it_is(
    folders: tuple[Path, ...], written: str, advice: str
) -> None:
    said = DataRoots.of(folders[0], (), None).nearest(written)
    assert said.startswith(advice) if advice else not said


def test_absolute_names_are_read_inside_any_of_the_folders(
    folders: tuple[Path, ...],
) -> None:
    third = str(folders[2] / "three.png")
    assert places(folders, third) == [third]
    with pytest.raises(
        UsageError,
        match=r"metadata\.json:1:image: .*three\.png' points outside the dataset's folders",
    ):
        places(folders[:2], third)


def test_a_missing_file_below_thousands_of_folders_is_looked_for_at_once(
    folders: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    real = files.os.path.realpath

    def noting(path: Any, **options: Any) -> str:
        looks.append(path)
        return real(path, **options)

    monkeypatch.setattr(files.os.path, "realpath", noting)
    roots = DataRoots(tuple(map(str, folders)))
    assert roots.nearest("a/" * 2000 + "none.png") == ""
    assert roots.nearest("a/b/ONE.png") == "; did you mean 'one.png'?"
    assert len(looks) <= 6


def test_a_file_elsewhere_is_named_once_with_the_root_that_allows_it(
    folders: tuple[Path, ...],
) -> None:
    third = str(folders[2] / "three.png")
    with pytest.raises(UsageError) as caught:
        DataRoots(tuple(map(str, folders[:2]))).find(third)
    assert str(caught.value).count("three.png") == 1
    assert caught.value.what.endswith(f"; --dataset_root {folders[2]} allows it")


def test_a_name_found_in_two_folders_is_refused_naming_both(
    folders: tuple[Path, ...],
) -> None:
    with pytest.raises(UsageError) as caught:
        places(folders, "both.png")
    both = f"{folders[1]}/both.png and {folders[2]}/both.png"
    assert caught.value.help_lines == (
        f"metadata.json:1:image: 'both.png' exists more than once: {both}",
    )


def test_one_file_seen_from_two_folders_is_one(folders: tuple[Path, ...]) -> None:
    (folders[1] / "one.png").symlink_to(folders[0] / "one.png")
    assert (
        places(folders, "one.png", "base/one.png") == []
        if False
        else places(folders, "one.png")
    )
    nested = (*folders, folders[1].parent / "second")
    assert places(nested, "two.png") == [str(folders[1] / "two.png")]


def test_a_link_may_lead_from_one_folder_to_another(folders: tuple[Path, ...]) -> None:
    (folders[0] / "link.png").symlink_to(folders[1] / "two.png")
    assert places(folders, "link.png") == [str(folders[0] / "link.png")]
    with pytest.raises(
        UsageError, match=r"'link\.png' points outside the dataset's folder, to"
    ):
        places(folders[:1], "link.png")


def test_a_missing_file_is_reported_once(folders: tuple[Path, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        places(folders, "none.png", "../none.png")
    first, second = caught.value.help_lines
    assert (
        first.endswith("no such file 'none.png'")
        and "points outside the dataset's folders" in second
    )


@pytest.mark.parametrize(
    "written, meant",
    [
        ("ONE.PNG", "one.png"),
        ("base/one.png", "one.png"),
        ("/home/somebody/pictures/Two.png", "two.png"),
        ("sub/Cafe\u0301.png", "sub/caf\u00e9.png"),
        ("one.png/", "one.png"),
        ("other.png", ""),
        ("out/secret.PNG", ""),
    ],
)
def test_a_file_that_is_there_under_a_name_like_it_is_suggested(
    folders: tuple[Path, ...], tmp_path: Path, written: str, meant: str
) -> None:
    (folders[0] / "sub").mkdir()
    (folders[0] / "sub/caf\u00e9.png").write_bytes(
        (folders[0] / "one.png").read_bytes()
    )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret.png").touch()
    (folders[0] / "out").symlink_to(tmp_path / "elsewhere")
    assert DataRoots.of(folders[0], folders[1:], None).nearest(written) == (
        f"; did you mean {meant!r}?" if meant else ""
    )


def test_a_root_that_is_no_folder_is_named_by_its_flag(
    folders: tuple[Path, ...],
) -> None:
    with pytest.raises(UsageError, match=r"--dataset_root: .*one\.png is not a folder"):
        places((*folders, folders[0] / "one.png"), "one.png")
    with pytest.raises(UsageError, match="--dataset_base_path: none is not a folder"):
        DataRoots.of(Path("none"), (), None)


@pytest.mark.usefixtures("tiny")
def test_the_command_line_repeats_the_flag(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data", ("a", "b"))
    for number, name in enumerate(("more", "else")):
        (tmp_path / name).mkdir()
        (tmp_path / f"data/{number}.png").rename(tmp_path / name / f"{number}.png")
    words: list[Any] = [
        "--model",
        "tiny",
        "--toy",
        "--dataset_base_path",
        tmp_path / "data",
        "--output_path",
    ]
    command = [
        str(word)
        for word in (*words, tmp_path / "out", "--dataset_root", tmp_path / "more")
    ]
    assert main(command) == 2
    assert "metadata.json:2:image: no such file '1.png'" in capfd.readouterr().err
    assert main([*command, "--dataset_root", str(tmp_path / "else")]) == 0


def test_a_file_is_inspected_once_unless_many_others_are_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rows have their own files, whatever slice they are in."""
    monkeypatch.setattr(files, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(files, "MOST_REMEMBERED", 2)
    inspected: list[str] = []

    def inspect(_: DataRoots, name: tuple[str, str]) -> str:
        inspected.append(name[0])
        return f"info of {name[0]}"

    monkeypatch.setattr(files, "_inspect", inspect)
    inspector = FileInspector([Column("image", "image")], tmp_path, (), None)
    names = [*"aab", "", *"baacdab"]
    found = inspector.with_files({"image": name} for name in names)
    assert [infos.get((row["image"], "image"), "") for row, infos in found] == [
        f"info of {name}" if name else "" for name in names
    ]
    # When c comes, b is the one that was not used for longest.
    assert inspected == ["a", "b", "c", "d", "b"]
