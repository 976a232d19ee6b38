"""`dstrain cache verify --repair` computes what is damaged again, and nothing else."""

import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest
from dstrain.cache.store import FeatureCache
from dstrain.cli.main import main
from dstrain.errors import StateError
from dstrain.runs.cache_commands.repair import repair
from dstrain.runs.cache_commands.verify import verified, verify

from tests.support.caching_project import plain
from tests.support.runs import project, train


@pytest.fixture(scope="module")
def filled(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose cache is filled."""
    folder = project(tmp_path_factory.mktemp("project"))
    train(folder, task="sft:data_process", feature_cache=folder / "whole")
    return folder


@pytest.fixture
def cache(filled: Path) -> Path:
    """A copy of the cache."""
    folder = filled / "cache"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(filled / "whole", folder)
    return folder


def values(folder: Path) -> dict[str, object]:
    cache = FeatureCache.open(folder)
    return {address: plain(cache.read(address)) for address in sorted(cache)}


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def rows(folder: Path) -> list[object]:
    return list(FeatureCache.open(folder).plan_rows(only(folder, "plans/*.json")))


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def mended(folder: Path) -> None:
    verify(folder, partial(repair, folder, places={}))


@pytest.mark.parametrize("at", [-3, 50], ids=["a value", "the header"])
def test_a_damaged_shard_is_as_it_was(
    cache: Path, filled: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    damage(only(cache, "shards/*"), at)
    with caplog.at_level("INFO"):
        mended(cache)
    assert verified(cache).problems == ()
    assert values(cache) == values(filled / "whole")
    # A damaged value costs its sample; a damaged header costs all of them.
    assert f"precomputing {1 if at < 0 else 6} of 6 samples" in caplog.text


def test_damaged_rows_of_a_plan_are_made_again(cache: Path, filled: Path) -> None:
    for path in (cache / "plans").glob("*.arrow"):
        damage(path, -3)
    mended(cache)
    assert verified(cache).problems == ()
    assert rows(cache) == rows(filled / "whole")


def test_a_plan_without_its_record_is_removed_and_named(cache: Path) -> None:
    path = only(cache, "plans/*.json")
    damage(path, 30)
    with pytest.raises(StateError, match=path.stem) as caught:
        mended(cache)
    assert "run the commands of stage 1" in caught.value.help_lines[0]
    assert not path.exists()


def test_without_the_dataset_the_command_to_run_is_named(
    cache: Path, filled: Path
) -> None:
    damage(only(cache, "shards/*"), -3)
    (filled / "data").rename(filled / "moved")
    try:
        with pytest.raises(StateError, match="cannot be computed here") as caught:
            mended(cache)
    finally:
        (filled / "moved").rename(filled / "data")
    assert "--task sft:data_process" in caught.value.help_lines[0]
    words = caught.value.help_lines[0].partition("run: dstrain ")[2]
    assert main(shlex.split(words)) == 0
    assert verified(cache).problems == ()
    assert values(cache) == values(filled / "whole")


def test_a_file_that_stage_1_did_not_write_stays(cache: Path) -> None:
    foreign = cache / "shards/model.safetensors"
    foreign.write_text("weights")
    with pytest.raises(StateError, match="stage 1 makes no file of this name"):
        mended(cache)
    assert foreign.read_text() == "weights"


def test_a_damaged_cache_is_repaired_by_the_command_that_verify_names(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(only(cache, "shards/*"), -3)
    assert main(["cache", "verify", str(cache)]) == 3
    words = capsys.readouterr().err.partition("run: dstrain ")[2].split()
    assert main(words) == 0
    assert main(["cache", "verify", str(cache), "--recompute", "2"]) == 0
    assert "of 6 samples" in capsys.readouterr().out
