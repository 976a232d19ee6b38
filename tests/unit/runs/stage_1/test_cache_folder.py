"""No feature cache is made among files of the user's."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.cli.main import main

from tests.support.runs import project, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return project(tmp_path)


def fill(here: Path, **changes: Any) -> None:
    flags = {"feature_cache": here / "cache", **changes}
    train(here, task="sft:data_process", **flags)


def put(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("mine")


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--feature_cache data --output_path out", "--feature_cache"),
        ("--task sft:data_process --output_path data", "--output_path"),
    ],
)
def test_the_users_own_photos_do_not_become_a_cache(
    words: str, flag: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", "tiny", "--toy", "--dataset_base_path", "data", *words.split()]
    before = {path: path.read_bytes() for path in Path("data").glob("*")}
    for dry_run in ([], ["--dry_run"]):
        assert main([*given, "--lora_rank", "2", *dry_run]) == 2
        assert f"{flag}: data " in capfd.readouterr().err
    assert {path: path.read_bytes() for path in Path("data").glob("*")} == before


@pytest.mark.parametrize("folder", [".", "..", "link"])
def test_a_folder_that_has_the_dataset_in_it_is_refused(
    folder: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "link").symlink_to(here)
    Path("deep").mkdir()
    monkeypatch.chdir("deep" if folder == ".." else ".")
    with pytest.raises(UsageError, match="no feature cache") as caught:
        fill(here, feature_cache=Path(folder))
    assert caught.value.where == "--feature_cache"
    second = shutil.copytree(here / "data", here / "held out/rows")
    flags = {"validation_dataset_base_path": second}
    with pytest.raises(UsageError, match="no feature cache"):
        fill(here, feature_cache=second.parent, **flags)


@pytest.mark.parametrize(
    "names",
    [
        (),
        (".DS_Store", ".git"),
        ("lost+found",),
        ("shards",),
        ("shards", "index", "plans"),
    ],
    ids=["empty", "hidden files", "a new disk", "killed at once", "killed later"],
)
def test_a_folder_of_nobodys_is_taken(names: tuple[str, ...], here: Path) -> None:
    """A first start that was killed before it wrote the marker is one of them."""
    for name in names:
        (here / "cache" / name).mkdir(parents=True)
    fill(here)


@pytest.mark.parametrize(
    "name", ["bad_samples.jsonl", "digests.npy", "dstrain.log", "other/store.json"]
)
def test_what_the_user_has_is_never_replaced(name: str, here: Path) -> None:
    put(f"cache/{name}")
    first = Path(name).parts[0]
    with pytest.raises(UsageError, match="no feature cache") as caught:
        fill(here)
    assert caught.value.help_lines[0] == f"it contains {first}"
    assert os.listdir("cache") == [first]
    assert Path("cache", name).read_text() == "mine"
