"""Model files are read once for all feature caches of a user."""

import errno
from pathlib import Path

import pytest
from dstrain import StateError
from dstrain.storage import sha256
from dstrain.storage.file_digests import ModelDigests
from dstrain.storage.file_memory import user_cache

from tests.support.clock import settle
from tests.support.unreadable import make_unreadable


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of three files that changed long ago, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    settle(monkeypatch)
    (tmp_path / "model").mkdir()
    for name in "abc":
        (tmp_path / "model" / name).write_text(name)
    return tmp_path / "model"


def test_the_folder_is_the_variables_xdgs_or_the_homes(tmp_path: Path) -> None:
    xdg = str(tmp_path)
    assert user_cache({"DSTRAIN_CACHE": "here", "XDG_CACHE_HOME": xdg}) == Path("here")
    assert (
        user_cache({"DSTRAIN_CACHE": "", "XDG_CACHE_HOME": xdg}) == tmp_path / "dstrain"
    )
    assert user_cache({"XDG_CACHE_HOME": "relative"}) == user_cache({})
    assert user_cache({}) == Path.home() / ".cache" / "dstrain"


def test_files_are_read_once_whatever_their_path_is_relative_to(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ModelDigests()
    digest = first.of_all([Path("model")])
    first.save()
    monkeypatch.chdir("model")
    second = ModelDigests()
    with monkeypatch.context() as patch:
        for name in "abc":
            make_unreadable(patch, model / name, errno.EIO)
        assert second.of_all([Path("../model")]) == digest
    assert second.record("a")[-1] == sha256(model / "a")
    Path("b").write_text("other")
    assert ModelDigests().of_all([model]) != digest
    with pytest.raises(StateError) as caught:
        second.check_unchanged([Path("a"), Path("b")])
    assert caught.value.where == str(model / "b")


def test_what_runs_store_at_the_same_time_is_kept(model: Path) -> None:
    one, other = ModelDigests(), ModelDigests()
    for name in "ac":
        one.of(f"model/{name}")
    one.save()
    other.of("model/b")
    Path("model/a").write_text("new")
    new = other.of("model/a")
    other.save()
    both = ModelDigests()
    assert both.record("model/a")[-1] == new
    assert all(both.known(str(model / name)) for name in "bc")


def test_a_folder_that_cannot_be_made_is_no_error(model: Path) -> None:
    (model.parent / "cache").write_text("a file")
    digests = ModelDigests()
    assert digests.of("model/a") == sha256(model / "a")
    digests.save()
    assert (model.parent / "cache").read_text() == "a file"
