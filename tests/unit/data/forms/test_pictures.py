"""Embedded files are written once, each under the digest of its bytes."""

import hashlib
from pathlib import Path

import pytest
from dstrain.data.forms.pictures import Pictures, pictures_folder
from dstrain.errors import UsageError


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pictures:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    return Pictures()


def test_equal_bytes_are_one_file_of_their_digest(pictures: Pictures) -> None:
    path = Path(pictures.keep(b"bytes", "x/a.PNG"))
    assert path.read_bytes() == b"bytes"
    assert path.name == hashlib.sha256(b"bytes").hexdigest() + ".png"
    assert path.is_relative_to(pictures_folder())
    time = path.stat().st_mtime_ns
    assert pictures.keep(b"bytes", "b.png") == str(path)
    assert path.stat().st_mtime_ns == time
    # What is not whole is written again.
    path.write_bytes(b"byt")
    pictures.keep(b"bytes", "b.png")
    assert path.read_bytes() == b"bytes"


@pytest.mark.parametrize("name", ["", "../../x", "a.p/../g", "a.verylong", "a. png"])
def test_a_name_gives_nothing_but_a_short_ending(pictures: Pictures, name: str) -> None:
    path = Path(pictures.keep(b"bytes", name))
    assert path.parent.parent == pictures.folder
    assert path.suffix == ""


def test_rows_are_recalled_while_the_file_and_what_it_had_are_there(
    pictures: Pictures, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"rows")
    kept = pictures.keep(b"bytes")
    rows = [[kept, ""], ["", ["x.png", kept]]]
    assert pictures.recall(file, ["a", "b"]) is None
    assert list(pictures.noting(file, ["a", "b"], rows)) == rows
    recalled = pictures.recall(file, ["a", "b"])
    assert recalled is not None
    assert list(recalled) == rows
    assert pictures.recall(file, ["a"]) is None
    Path(kept).unlink()
    assert pictures.recall(file, ["a", "b"]) is None
    pictures.keep(b"bytes")
    assert pictures.recall(file, ["a", "b"]) is not None
    file.write_bytes(b"others")
    assert pictures.recall(file, ["a", "b"]) is None


def test_a_list_that_was_not_finished_is_none(
    pictures: Pictures, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    file.touch()
    begun = pictures.noting(file, ["a"], [[""], [""]])
    next(begun)
    begun.close()  # type: ignore[attr-defined]
    assert pictures.recall(file, ["a"]) is None
    list(pictures.noting(file, ["a"], [[""], [""]]))
    (path,) = (pictures.folder / "lists").iterdir()
    path.write_text(path.read_text().removesuffix("null\n"))
    assert pictures.recall(file, ["a"]) is None


def test_without_a_place_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstrain.data.forms.pictures.user_cache", lambda: None)
    with pytest.raises(UsageError, match="DSTRAIN_CACHE"):
        pictures_folder()
