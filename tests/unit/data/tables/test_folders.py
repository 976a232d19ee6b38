"""A folder of images and captions is a table; all that is wrong is named at once."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain import SystemFault, UsageError
from dstrain.data import DataConfig, Table, list_media, read_caption
from dstrain.data.tables import Reading, find_source, left_out, texts_of
from dstrain.graph import Input
from dstrain.plugin import Column

from tests.support.clock import settle
from tests.support.datasets import OWN_SIZES
from tests.support.unreadable import make_unreadable

TEXT = {"prompt": Column("text")}
IMAGES: dict[str, Input] = {**TEXT, "input_image": Column("file_name", "image")}
VIDEOS: dict[str, Input] = {**TEXT, "input_video": Column("file_name", "video")}
LISTS: dict[str, Input] = {**TEXT, "images": Column("file_name", "images")}
LONG_AGO = (10**18, 10**18)


def write(folder: Path, *names: str, **captions: str) -> Path:
    """Write files of long ago: those with their names in them, and captions by their stem."""
    files = {name: name for name in names}
    files |= {f"{stem}.txt": text for stem, text in captions.items()}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        os.utime(path, ns=LONG_AGO)
    return folder


def read(
    folder: Path,
    inputs: dict[str, Input] = IMAGES,
    default: str | None = None,
    roots: tuple[Path, ...] = (),
) -> Table:
    reading = Reading(default_caption=default, roots=roots)
    return reading.read(find_source(folder, roots=roots), inputs)


def cells(table: Table) -> list[tuple[object, object]]:
    return [(row["file_name"], row["text"]) for row in table.rows]


def bad(table: Table) -> list[str]:
    """The places of all faults, and other lines of the error whole."""
    with pytest.raises(UsageError) as caught:
        table.refuse(table.faults)
    return [line.partition(": ")[0] for line in caught.value.help_lines]


def test_a_row_is_an_image_and_its_caption(tmp_path: Path) -> None:
    write(tmp_path, "b.png", "sub/a.jpg", b="a cat\n")
    (tmp_path / "sub/a.json").write_text('{"text": "a"}')
    table = read(tmp_path)
    assert cells(table) == [("b.png", "a cat"), ("sub/a.jpg", "a")]
    assert table.columns == ("file_name", "text")
    source = find_source(tmp_path)
    assert Reading().read_columns(source, IMAGES).columns == table.columns
    places = [table.where(1), table.where(1, "text"), table.where(0, "text")]
    assert places == ["sub/a.jpg", "sub/a.json", "b.txt"]
    assert set(texts_of(source)) >= {"b.png", "a cat\n", "sub/a.jpg"}


def test_a_caption_may_have_its_images_name_with_accents_apart(tmp_path: Path) -> None:
    write(tmp_path, "caf\u00e9.png", café="a cup")
    assert cells(read(tmp_path)) == [("caf\u00e9.png", "a cup")]


def test_the_order_is_that_of_the_bytes_of_relative_names(tmp_path: Path) -> None:
    names = ["Z.png", "a.png", "a.jpg", "a-1.png", "a/b.png", "a/b/c.jpg", "é.webp"]
    names += ["a.b.png", *(f"{number}.png" for number in range(2100))]
    write(tmp_path, *names, ".hidden.png", ".git/x.png", "notes.txt", "a/readme.md")
    table = read(tmp_path, default="")
    assert not table.faults
    found = [name for name, _ in cells(table)]
    assert found == sorted(names, key=os.fsencode)


def test_images_are_read_for_images_and_both_for_videos(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "a.mov", "b.mp4", a="a", b="b")
    assert cells(read(tmp_path)) == [("a.png", "a")]
    (tmp_path / "a.mov").unlink()
    assert cells(read(tmp_path, VIDEOS)) == [("a.png", "a"), ("b.mp4", "b")]
    assert read(tmp_path, LISTS).rows[0]["file_name"] == ["a.png"]
    (tmp_path / "a.png").unlink()
    with pytest.raises(UsageError) as caught:
        read(tmp_path)
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "caption"),
    [
        ("a.txt", b"a dog\n", "a dog"),
        ("a.txt", b"\xef\xbb\xbf a dog\r\nin a boat\r\n\r\n", "a dog\nin a boat"),
        ("a.caption", "ünï 猫".encode(), "ünï 猫"),
        ("a.txt", b" \n", ""),
        ("a.json", b'{"caption": "a", "prompt": "a "}', "a"),
        ("a.JSON", b'{"text": " c ", "size": [1, 2]}', "c"),
        ("a.json", b'{"caption": null, "text": "c"}', "c"),
        *(("a.json", content, "") for content in (b'{"size": 3}', b"[1]", b"")),
    ],
)
def test_the_caption_is_the_text_of_a_file(
    tmp_path: Path, name: str, content: bytes, caption: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert read_caption(tmp_path / name) == caption


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.txt", "caf\xe9".encode("latin-1"), "byte 0xe9"),
        ("a.txt", b"\xef\xbb\xbf\xff", "byte 0xff"),
        ("a.txt", "a dog".encode("utf-16"), "byte 0xff"),
        ("a.txt", b"a\0b", "NUL"),
        ("a.txt", b"x" * (2**20 + 1), "1,048,577"),
        ("a.txt", b"x" * (2**22 + 1), "4,194,304"),
        ("a.json", b"{", "JSON"),
        ("a.json", b'{"caption": 3}', "caption"),
        ("a.json", b'{"caption": "a", "caption": "b"}', "caption"),
        ("a.json", b'{"caption": "a", "text": "b"}', "caption and text"),
        ("a.json", b'{"caption":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "JSON"),
    ],
)
def test_what_is_no_caption_is_a_fault_of_its_file(
    tmp_path: Path, name: str, content: bytes, named: str
) -> None:
    write(tmp_path, "a.png")
    (tmp_path / name).write_bytes(content)
    table = read(tmp_path, default="a picture")
    (fault,) = table.faults
    assert table.where(fault.row, fault.column) == name
    assert named in fault.reason
    assert not table.advice


def test_missing_captions_are_named_all_at_once_with_what_to_do(tmp_path: Path) -> None:
    names = [f"{number:02}.png" for number in range(60)]
    empty = read(write(tmp_path / "x", "x.png", x="\n"))
    assert "--default_caption" in bad(empty)[-1]
    write(tmp_path, *names)
    (tmp_path / "07.txt").write_text("seven")
    (tmp_path / "08.txt").write_text(" \n")
    found = bad(read(tmp_path))
    assert found[:8] == [*names[:7], "08.txt"]
    assert "--default_caption" in found[-1]
    table = read(tmp_path, default="a picture")
    assert not table.faults
    captions = [caption for _, caption in cells(table)]
    assert captions == ["a picture"] * 7 + ["seven"] + ["a picture"] * 53


@pytest.mark.parametrize(
    ("files", "place", "named"),
    [
        (("a.png", "a.txt", "a.caption"), "a.png", "a.txt and a.caption"),
        (("a.png", "a.jpg", "a.txt"), "a.txt", "a.jpg and of a.png"),
        (("x/a.png", "x/a.JPG", "x/a.JSON"), "x/a.JSON", ""),
    ],
)
def test_what_could_be_two_captions_or_none_is_refused_by_name(
    tmp_path: Path, files: tuple[str, ...], place: str, named: str
) -> None:
    table = read(write(tmp_path, *files), default="a picture")
    assert bad(table)[0] == place
    assert named in table.faults[0].reason


def test_a_file_of_another_program_is_no_second_caption(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "a.b.txt", a="x")
    (tmp_path / "a.json").write_text('{"id": 3, "tags": ["y"]}')
    assert cells(read(tmp_path)) == [("a.png", "x")]
    (medium,) = list_media(tmp_path)
    assert medium.captions == ("a.txt", "a.json")


def test_a_caption_that_leads_out_of_the_folder_is_not_read(tmp_path: Path) -> None:
    secret = write(tmp_path, secret="the secret") / "secret.txt"
    folder = write(tmp_path / "data", "a.png")
    (folder / "a.txt").symlink_to(secret)
    table = read(folder)
    assert bad(table) == ["a.txt"]
    assert str(secret) in table.faults[0].reason
    assert cells(table) == [("a.png", "")]
    assert cells(read(folder, roots=(tmp_path,))) == [("a.png", "the secret")]
    assert "the secret" in texts_of(find_source(folder, roots=(tmp_path,)))
    for target in (folder / "none", "a.txt"):
        (folder / "a.txt").unlink()
        (folder / "a.txt").symlink_to(target)
        assert bad(read(folder)) == ["a.txt"]


def test_a_name_with_a_newline_stays_one_line_of_a_message(tmp_path: Path) -> None:
    assert bad(read(write(tmp_path, "a\nb.png")))[0] == "'a\\nb.png'"


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "b", "deep/er/x.png")
    (folder / "around").symlink_to(folder)
    with pytest.raises(UsageError) as caught:
        find_source(folder)
    assert caught.value.where == str(folder / "around")
    # No table is looked for behind it.
    write(tmp_path / "elsewhere", "metadata.csv")
    folder = write(tmp_path / "c", "a.png", "below/b.png")
    (folder / "below/link").symlink_to(tmp_path / "elsewhere")
    assert find_source(folder).form == "folder"


def test_what_belongs_to_an_image_or_a_run_is_no_row(tmp_path: Path) -> None:
    parts = ("a-masklabel.png", "a_control.jpg", "d.MOV", "c.mov")
    write(tmp_path, "a.png", "b_mask.png", "c.HEIC", "d.jpg", "e.mov", *parts)
    write(tmp_path, "out/run.json", "out/logs/x", "out/previews/p.png", "out/p.txt")
    write(tmp_path, "kept/store.json", "kept/shards/s", "kept/image.png")
    write(tmp_path, "mine/run.json", "mine/g.png")
    rows = ["a.png", "b_mask.png", "d.jpg", "e.mov", "mine/g.png"]
    assert [one.name for one in list_media(tmp_path)] == rows
    for name in rows:
        (tmp_path / name).with_suffix(".txt").write_text(name)
    # With a caption, an image may as well be the still of a movie.
    assert bad(read(tmp_path, VIDEOS)) == ["d.txt"] * 2
    (tmp_path / "d.MOV").rename(tmp_path / "b_control.mov")
    write(tmp_path, "b.png", b="b")
    rows = ["a.png", "b.png", *rows[2:]]
    assert [name for name, _ in cells(read(tmp_path, VIDEOS))] == rows
    assert left_out(tmp_path, VIDEOS)


def test_a_folder_of_a_run_may_have_the_users_photos(tmp_path: Path) -> None:
    write(tmp_path, "run.json", "logs/x", "previews/p.png", "photos/a.png", "b.png")
    assert [one.name for one in list_media(tmp_path)] == ["b.png", "photos/a.png"]


# What identifies the content of a folder.


def digest(folder: Path, *roots: Path) -> str:
    return find_source(folder, roots=roots).digest()


def test_the_digest_is_of_names_and_captions_wherever_the_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "a", "a.png", "a.txt", "b.png")
    before = digest(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert digest(tmp_path / "copy") == before
    # Also where nothing can be remembered.
    monkeypatch.setenv("DSTRAIN_CACHE", str(folder / "a.txt"))
    assert digest(write(folder, "notes.md")) == before


CHANGES: dict[str, Callable[[Path], object]] = {
    "caption": lambda folder: write(folder, a="another caption"),
    "same size": lambda folder: write(folder, a="A.txt"),
    "renamed": lambda folder: (folder / "b.png").rename(folder / "c.png"),
    "added": lambda folder: write(folder, "c.png"),
    "gone": lambda folder: (folder / "b.txt").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(tmp_path: Path, change: str) -> None:
    folder = write(tmp_path / "a", "a.png", "a.txt", "b.png", "b.txt")
    before = digest(folder)
    CHANGES[change](folder)
    assert digest(folder) != before


def test_captions_that_did_not_change_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "a", "a.png", "a.txt", "b.png")
    settle(monkeypatch)
    before = digest(folder)
    make_unreadable(monkeypatch, folder / "a.txt", 5)
    assert digest(folder) == before
    (folder / "b.png").rename(folder / "c.png")
    with pytest.raises(SystemFault):
        digest(folder)


@pytest.mark.parametrize("kind", ["pipe", "device", "large", "link out"])
def test_what_is_no_caption_file_is_not_read(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "data", "a.png")
    elsewhere = write(tmp_path / "elsewhere", "secret.txt")
    caption = folder / "a.txt"
    if kind == "pipe":
        os.mkfifo(caption)
    elif kind == "device":
        caption.symlink_to("/dev/zero")
    elif kind == "large":
        caption.write_bytes(bytes(2**22 + 1))
    else:
        caption.symlink_to(elsewhere / "secret.txt")
    before = digest(folder)
    if kind == "large":
        caption.write_bytes(b"x" * (2**22 + 1))
        assert digest(folder) == before
    if kind == "link out":
        followed = digest(folder, elsewhere)
        config = DataConfig(folder, None, None, OWN_SIZES, roots=(elsewhere,))
        table = config.reading.read(config.source, IMAGES)
        assert table.digest == followed == config.source.digest()
        write(elsewhere, secret="changed")
        assert digest(folder) == before != followed
        caption.unlink()
        write(folder, a="secret.txt")
        assert digest(folder) == followed


# What is not read.


def test_what_is_not_read_is_counted_with_an_example(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "a.txt", "b.mp4", "b.txt", "orphan.txt", "x/c.json")
    write(tmp_path, "IMG_1.HEIC", "IMG_1.txt", ".hidden.txt")
    said = "files are not read, such as x/c.json"
    assert left_out(tmp_path, IMAGES) == f"6 {said}"
    assert left_out(tmp_path, VIDEOS) == f"4 {said}"
    folder = write(tmp_path / "y", "a.png", "a.txt")
    assert left_out(folder, IMAGES) == ""


def test_a_folder_where_all_have_captions_is_read(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "a.txt", "deep/metadata.csv", ".git/metadata.csv")
    assert find_source(tmp_path).form == "folder"
    unread = write(tmp_path / "unread", "IMG_1.HEIC", "IMG_1.txt")
    with pytest.raises(UsageError, match=r"IMG_1\.HEIC"):
        find_source(unread)
