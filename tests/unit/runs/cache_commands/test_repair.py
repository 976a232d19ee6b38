"""`dstrain cache verify --repair` computes what is damaged again, and nothing else."""

import errno
import shlex
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from dstrain import StateError, SystemFault
from dstrain.cache import FeatureCache, read_record
from dstrain.cli.main import main
from dstrain.runs import repair, verify
from dstrain.runs.cache_commands.verify import Problem, verified

from tests.support.caching_project import plain
from tests.support.runs import project, train
from tests.support.unreadable import make_unreadable


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


@pytest.mark.parametrize("kind", ["shards/*", "plans/*.json", "plans/*.arrow"])
def test_what_cannot_be_read_is_not_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    before = sorted(cache.rglob("[!.]*"))
    path = next(cache.glob(kind))
    make_unreadable(monkeypatch, path, errno.EIO)
    assert main(["cache", "verify", str(cache), "--repair"]) == 4
    assert sorted(cache.rglob("[!.]*")) == before
    # Nor where it could be read when it was found to be damaged.
    found = path if path.suffix != ".arrow" else only(cache, "plans/*.json")
    with pytest.raises(SystemFault):
        repair(cache, [Problem(found, "is damaged")], {})
    assert sorted(cache.rglob("[!.]*")) == before


def test_what_others_removed_or_repaired_meanwhile_is_left(cache: Path) -> None:
    shard, plan = only(cache, "shards/*"), only(cache, "plans/*.json")
    before = sorted(cache.rglob("[!.]*"))
    gone = [shard.with_stem("0" * 40), plan.with_stem("0" * 40)]
    repair(cache, [Problem(path, "is damaged") for path in (shard, plan, *gone)], {})
    assert sorted(cache.rglob("[!.]*")) == before
    assert verified(cache).problems == ()


def test_an_index_and_digests_are_made_again(cache: Path) -> None:
    for path, at in ((only(cache, "index/*"), 200), (cache / "digests.npy", -10)):
        whole = path.read_bytes()
        damage(path, at)
        mended(cache)
        assert verified(cache).problems == ()
        assert not path.exists() or path.read_bytes() == whole
    assert len(list((cache / "index").iterdir())) == 1


def test_digests_of_another_program_stay(cache: Path) -> None:
    path = cache / "digests.npy"
    path.write_text("mine")
    with pytest.raises(StateError, match="is nothing that stage 1 writes") as caught:
        mended(cache)
    assert caught.value.help_lines == ("move it away",)
    assert path.read_text() == "mine"


@pytest.fixture
def other_captions(filled: Path) -> Iterator[None]:
    """Other metadata than that of the plan."""
    path = only(filled, "data/metadata.*")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"two dogs", b"ten dogs"))
    yield
    path.write_bytes(whole)


@pytest.mark.usefixtures("other_captions")
def test_a_plan_of_other_metadata_is_not_made_again_but_can_be_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(only(cache, "shards/*"), -3)
    plan = only(cache, "plans/*.json")
    with pytest.raises(StateError, match="their metadata has changed") as caught:
        mended(cache)
    assert caught.value.what.endswith(plan.stem)
    assert [plan] == list(cache.glob("plans/*.json"))
    words = caught.value.help_lines[-1].partition("run: dstrain ")[2]
    assert main([*shlex.split(words), "--yes"]) == 0
    assert verified(cache).problems == ()


@pytest.mark.usefixtures("other_captions")
def test_damaged_rows_of_other_metadata_can_be_removed(cache: Path) -> None:
    record = read_record(only(cache, "plans/*.json"))
    damage(cache / f"plans/{record['columns']['samples']}.arrow", -3)
    with pytest.raises(StateError, match="their metadata has changed") as caught:
        mended(cache)
    Path(caught.value.help_lines[-1].partition("delete ")[2]).unlink()
    assert main(["cache", "prune", str(cache), "--yes"]) == 0
    assert verified(cache).problems == ()


@pytest.mark.usefixtures("tiny")
def test_each_of_two_datasets_is_compared_with_its_own_metadata(tmp_path: Path) -> None:
    here = project(tmp_path)
    cache = here / "cache"
    shutil.copytree(here / "data", here / "second")
    captions = only(here, "second/metadata.*")
    captions.write_bytes(captions.read_bytes().replace(b"two dogs", b"ten dogs"))
    second = here / "second"
    given = {"feature_cache": cache, "validation_dataset_base_path": second}
    train(here, task="sft:data_process", **given)
    plans = sorted((cache / "plans").glob("*.json"))
    for path in (cache / "shards").iterdir():
        damage(path, 50)
    mended(cache)
    assert verified(cache).problems == ()
    assert sorted((cache / "plans").glob("*.json")) == plans


@pytest.mark.usefixtures("tiny")
def test_a_second_dataset_is_computed_again_without_the_plan_of_the_first(
    tmp_path: Path,
) -> None:
    here = project(tmp_path)
    cache, second = here / "cache", here / "second"
    shutil.copytree(here / "data", second)
    given = {"feature_cache": cache, "validation_dataset_base_path": second}
    train(here, task="sft:data_process", **given)
    records = {path: read_record(path) for path in cache.glob("plans/*.json")}
    (first,) = (path for path, one in records.items() if "use" not in one["identity"])
    first.unlink()
    shutil.rmtree(here / "data")
    for path in (cache / "shards").iterdir():
        damage(path, 50)
    mended(cache)
    assert verified(cache).problems == ()
