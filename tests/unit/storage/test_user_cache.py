"""Model files are read once for all feature caches of a user."""

import json
import os
from pathlib import Path

import pytest
from dstrain import StateError
from dstrain.storage import sha256
from dstrain.storage.user_cache import FILE, ModelDigests, user_cache

SECRET = "hf_abcdefghijklmnop"


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read; those in `model` changed long ago."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("dstrain.storage.hashing.SETTLED", 0)
    (tmp_path / "model").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "model" / name).write_text(name)
    read: list[Path] = []

    def counted(path: Path) -> str:
        read.append(path)
        return sha256(path)

    monkeypatch.setattr("dstrain.storage.hashing.sha256", counted)
    return read


def test_the_folder_is_that_of_the_variable_else_of_xdg_else_of_the_home(
    tmp_path: Path,
) -> None:
    xdg = str(tmp_path)
    assert user_cache({"DSTRAIN_CACHE": "here", "XDG_CACHE_HOME": xdg}) == Path("here")
    assert user_cache({"XDG_CACHE_HOME": xdg}) == tmp_path / "dstrain"
    assert user_cache({"XDG_CACHE_HOME": "relative"}) == user_cache({})
    assert user_cache({}) == Path.home() / ".cache" / "dstrain"


def test_files_are_read_once_whatever_their_path_is_relative_to(
    tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ModelDigests()
    digest = first.of_all([Path("model")])
    first.save()
    assert len(read) == 3
    monkeypatch.chdir("model")
    second = ModelDigests()
    assert second.of_all([Path("../model")]) == digest
    assert second.record("a")[-1] == sha256(tmp_path / "model/a")
    assert len(read) == 3
    Path("b").write_text("other")
    assert ModelDigests().of_all([tmp_path / "model"]) != digest
    with pytest.raises(StateError, match="changed while it was in use"):
        second.check_unchanged([Path("b")])


def test_what_runs_store_at_the_same_time_is_kept_and_what_is_gone_is_not(
    tmp_path: Path, read: list[Path]
) -> None:
    one, other = ModelDigests(), ModelDigests()
    one.of("model/a")
    one.of("model/c")
    one.save()
    Path("model/c").unlink()
    other.of("model/b")
    other.save()
    stored = json.loads((tmp_path / "cache" / FILE).read_text())
    assert [*stored] == [str(tmp_path / "model" / name) for name in "ab"]


def test_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, read: list[Path]
) -> None:
    (tmp_path / "cache").write_text("a file")
    digests = ModelDigests()
    assert digests.of("model/a") == sha256(tmp_path / "model/a")
    digests.save()
    assert (tmp_path / "cache").read_text() == "a file"


def test_a_path_with_a_secret_is_not_written(
    tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    os.rename("model/b", f"model/{SECRET}")
    digests = ModelDigests()
    digests.of_all([Path("model")])
    digests.save()
    text = (tmp_path / "cache" / FILE).read_text()
    assert str(tmp_path / "model/a") in text and SECRET not in text
