"""Embedded files are written once, each under the digest of its bytes."""

import hashlib
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.data.forms import embedded_folder
from dstrain.data.forms.embedded import EmbeddedFiles
from dstrain.data.table import is_embedded_file


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedFiles:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    return EmbeddedFiles()


def test_equal_bytes_are_one_file_of_their_digest(store: EmbeddedFiles) -> None:
    path = Path(store.keep(b"bytes", "x/a.PNG"))
    assert path.read_bytes() == b"bytes"
    assert path.name == hashlib.sha256(b"bytes").hexdigest() + ".png"
    assert path.is_relative_to(embedded_folder())
    time = path.stat().st_mtime_ns
    assert store.keep(b"bytes", "b.png") == str(path)
    assert path.stat().st_mtime_ns == time
    # What is not whole is written again.
    path.write_bytes(b"byt")
    store.keep(b"bytes", "b.png")
    assert path.read_bytes() == b"bytes"


def test_damage_of_the_same_size_is_seen_and_mended(
    store: EmbeddedFiles, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"rows")
    path = Path(store.keep(b"bytes", "a.png"))
    list(store.noting(file, ["a"], [[str(path)], ["/elsewhere/x.png"]]))
    assert store.recall(file, ["a"]) is not None
    path.write_bytes(b"b\0tes")
    assert store.recall(file, ["a"]) is None
    assert store.keep(b"bytes", "a.png") == str(path)
    assert path.read_bytes() == b"bytes"
    assert store.recall(file, ["a"]) is not None


@pytest.mark.parametrize("name", ["", "../../x", "a.p/../g", "a.verylong", "a. png"])
def test_a_name_gives_nothing_but_a_short_ending(
    store: EmbeddedFiles, name: str
) -> None:
    path = Path(store.keep(b"bytes", name))
    assert path.parent.parent == store.folder
    assert path.suffix == ""


def test_rows_are_recalled_while_the_file_and_what_it_had_are_there(
    store: EmbeddedFiles, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"rows")
    kept = store.keep(b"bytes")
    rows = [[kept, ""], ["", ["x.png", kept]]]
    assert store.recall(file, ["a", "b"]) is None
    assert list(store.noting(file, ["a", "b"], rows)) == rows
    recalled = store.recall(file, ["a", "b"])
    assert recalled is not None
    assert list(recalled) == rows
    assert store.recall(file, ["a"]) is None
    Path(kept).unlink()
    assert store.recall(file, ["a", "b"]) is None
    store.keep(b"bytes")
    assert store.recall(file, ["a", "b"]) is not None
    file.write_bytes(b"others")
    assert store.recall(file, ["a", "b"]) is None


def test_a_list_that_was_not_finished_is_none(
    store: EmbeddedFiles, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    file.touch()
    begun = store.noting(file, ["a"], [[""], [""]])
    next(begun)
    begun.close()  # type: ignore[attr-defined]
    assert store.recall(file, ["a"]) is None
    list(store.noting(file, ["a"], [[""], [""]]))
    (path,) = (store.folder / "lists").iterdir()
    path.write_text(path.read_text().removesuffix("null\n"))
    assert store.recall(file, ["a"]) is None


def test_without_a_place_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstrain.data.forms.embedded.user_cache", lambda: None)
    with pytest.raises(UsageError, match="DSTRAIN_CACHE"):
        embedded_folder()


def test_the_file_of_a_row_is_known_by_its_place_and_digest(
    store: EmbeddedFiles, tmp_path: Path
) -> None:
    path = store.keep(b"a picture", "a.png")
    assert is_embedded_file(path)
    assert not is_embedded_file(str(tmp_path / Path(path).name))
    assert not is_embedded_file(str(Path(path).with_name("a.png")))
