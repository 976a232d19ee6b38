"""No feature cache is made among files of the user's."""

import os
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError, run
from dstrain.cache import FeatureCache
from dstrain.cli.main import main
from dstrain.runs import Setup
from dstrain.runs.resolve import resolve
from dstrain.runs.stage_1.cache_folder import refuse_folder

from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return project(tmp_path)


def stage_1(here: Path, **changes: Any) -> Setup:
    given = {"feature_cache": here / "cache", "task": "sft:data_process", **changes}
    return resolve(config(here, **given))


def test_the_users_own_photos_do_not_become_a_cache(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "tiny", "--toy", "--dataset_base_path", "data"]
    before = {path: path.read_bytes() for path in Path("data").glob("*")}
    stage = ["--task", "sft:data_process"]
    for task, flag in (([], "--feature_cache"), (stage, "--output_path")):
        both = ["--feature_cache", "data", "--output_path", "out"]
        more = both if flag == "--feature_cache" else ["--output_path", "data"]
        for dry_run in ([], ["--dry_run"]):
            assert main([*words, "--lora_rank", "2", *task, *more, *dry_run]) == 2
            said = capfd.readouterr().err
            assert f"{flag}: data has the dataset data in it" in said
            assert "give an empty or new folder" in said
    assert {path: path.read_bytes() for path in Path("data").glob("*")} == before


def test_a_folder_with_anything_in_it_is_refused_and_named(here: Path) -> None:
    (here / "cache").mkdir()
    (here / "cache/thesis.txt").touch()
    with pytest.raises(UsageError, match="not empty and no feature cache") as error:
        refuse_folder(stage_1(here))
    assert error.value.help_lines == ("it contains thesis.txt",)
    Path("photos").mkdir()
    Path("photos/cat.png").touch()
    with pytest.raises(UsageError, match="--output_path: photos is not empty"):
        refuse_folder(stage_1(here, feature_cache=None, output_path=Path("photos")))


@pytest.mark.parametrize("folder", [".", "..", "link"])
def test_a_folder_that_has_the_dataset_in_it_is_refused(
    folder: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "link").symlink_to(here)
    Path("deep").mkdir()
    monkeypatch.chdir("deep" if folder == ".." else ".")
    with pytest.raises(UsageError, match="has the dataset"):
        refuse_folder(stage_1(here, feature_cache=Path(folder)))


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
    refuse_folder(stage_1(here))


def test_files_beside_the_parts_of_a_cache_are_no_matter(here: Path) -> None:
    FeatureCache.create(here / "cache")
    (here / "cache/notes.txt").write_text("mine")
    refuse_folder(stage_1(here))
    os.unlink(here / "cache/store.json")
    (here / "cache/dstrain.log").touch()
    refuse_folder(stage_1(here))


def test_a_folder_that_holds_other_caches_may_become_one(here: Path) -> None:
    setup = stage_1(here, feature_cache=here / "cache/other")
    run(setup.config)
    refuse_folder(stage_1(here))
    (here / "cache/mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and no feature cache"):
        refuse_folder(stage_1(here))
