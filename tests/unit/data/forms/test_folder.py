"""A folder of images and captions is a table; what is wrong is named all at once."""

from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.data import Table
from dstrain.data.forms.folder import folder_columns, folder_texts, read_folder
from dstrain.plugin import Column

IMAGE, VIDEO = Column("image", "image"), Column("video", "video")


def read(folder: Path, column: Column = IMAGE, default: str | None = None) -> Table:
    return read_folder(folder, column, default)


def cells(table: Table) -> list[tuple[object, object]]:
    return [(row["file_name"], row["text"]) for row in table.rows]


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        stem, _, ending = name.rpartition("_")
        path = folder / f"{stem.replace('__', '/')}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def faults(table: Table) -> str:
    with pytest.raises(UsageError) as caught:
        table.refuse(table.faults)
    return str(caught.value)


def test_a_row_is_an_image_and_its_caption(tmp_path: Path) -> None:
    write(
        tmp_path, b_png="", b_txt="a cat\n", sub__a_jpg="", sub__a_json='{"text": "a"}'
    )
    table = read(tmp_path)
    assert cells(table) == [("b.png", "a cat"), ("sub/a.jpg", "a")]
    assert table.columns == folder_columns(tmp_path).columns == ("file_name", "text")
    assert [table.where(1), table.where(1, "text"), table.where(0, "text")] == [
        *("sub/a.jpg", "sub/a.json"),
        "b.txt",
    ]
    assert set(folder_texts(tmp_path)) >= {"b.png", "a cat\n", "sub/a.jpg"}


def test_images_are_read_for_images_and_both_for_videos(tmp_path: Path) -> None:
    write(tmp_path, a_png="", a_txt="a", b_mp4="", b_txt="b")
    assert cells(read(tmp_path)) == [("a.png", "a")]
    assert cells(read(tmp_path, VIDEO)) == [("a.png", "a"), ("b.mp4", "b")]
    listed = read(tmp_path, Column("images", "images"))
    assert listed.rows[0]["file_name"] == ["a.png"]


def test_missing_captions_are_named_all_at_once_with_what_to_do(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number:02}.png").touch()
    (tmp_path / "07.txt").write_text("seven")
    (tmp_path / "08.txt").write_text(" \n")
    said = faults(read(tmp_path)).splitlines()
    assert said[0].endswith("59 bad values")
    assert said[1] == "  00.png: has no caption, such as 00.txt"
    assert "  08.txt: has no caption in it" in said
    assert said[-3] == "  and 9 more"
    assert "there is no metadata" in said[-2]
    assert "--default_caption TEXT" in said[-1]
    table = read(tmp_path, default="a picture")
    assert not table.faults
    assert [caption for _, caption in cells(table)].count("a picture") == 59


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"a_png": "", "a_txt": "x", "a_caption": "y"},
            "a.png: has two captions, in a.txt and a.caption: remove one",
        ),
        (
            {"a_png": "", "a_jpg": "", "a_txt": "x"},
            "a.txt: is the caption of a.jpg and of a.png: give each a name",
        ),
        ({"a_png": "", "a_json": "{"}, "a.json: is not valid JSON"),
    ],
)
def test_what_could_be_two_captions_or_none_is_refused_by_name(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    write(tmp_path, **files)
    assert said in faults(read(tmp_path, default="a picture"))


def test_a_file_of_another_program_beside_a_caption_is_no_second_caption(
    tmp_path: Path,
) -> None:
    write(tmp_path, a_png="", a_txt="x", a_json='{"id": 3, "tags": ["y"]}')
    assert cells(read(tmp_path)) == [("a.png", "x")]


def test_a_caption_in_another_encoding_is_named_by_file_and_byte(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "a.txt").write_bytes("caf\xe9".encode("latin-1"))
    said = faults(read(tmp_path))
    assert "a.txt: is not UTF-8 text (byte 4 is 0xe9); save it as UTF-8" in said


def test_a_caption_that_leads_out_of_the_folder_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.png").touch()
    (folder / "a.txt").symlink_to(secret)
    table = read(folder)
    assert "a.txt: points outside the dataset's folder" in faults(table)
    assert cells(table) == [("a.png", "")]
    roots = read_folder(folder, IMAGE, None, [tmp_path])
    assert cells(roots) == [("a.png", "the secret")]
    (folder / "a.txt").unlink()
    (folder / "a.txt").symlink_to(folder / "none")
    assert "a.txt: cannot be read: No such file" in faults(read(folder))


def test_a_name_with_a_newline_stays_one_line_of_a_message(tmp_path: Path) -> None:
    (tmp_path / "a\nb.png").touch()
    assert "  'a\\nb.png': has no caption" in faults(read(tmp_path))


def test_a_folder_without_what_is_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path, b_mp4="", b_txt="b")
    with pytest.raises(UsageError, match="has no image, and no metadata"):
        read(tmp_path)


def test_a_link_that_leads_to_itself_is_a_bad_row(tmp_path: Path) -> None:
    for name in ("1.png", "1.txt"):
        (tmp_path / name).symlink_to(name)
    table = read_folder(tmp_path, None, None)
    (fault,) = table.faults
    assert table.where(fault.row, fault.column) == "1.txt"
    assert fault.reason == "is a link that leads to itself"
