"""`dstrain cache verify --repair` removes what is damaged, and names what fills it again."""

import errno
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError, SystemFault
from dstrain.cache import FeatureCache, stored_plans
from dstrain.cache.backend.plan_files import commit_plans, read_record
from dstrain.cache.commands.verify import repair, verify
from dstrain.cli.main import main

from tests.support.caching_project import plain
from tests.support.runs import project, train
from tests.support.unreadable import make_unreadable


@pytest.fixture
def cache(here: Path) -> Path:
    folder = here / "cache"
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(here / "whole", folder)


def values(folder: Path) -> dict[str, object]:
    cache = FeatureCache.open(folder)
    return {address: plain(cache.read(address)) for address in sorted(cache)}


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def rows(folder: Path) -> list[object]:
    (plan,) = stored_plans(folder)
    return list(plan.samples())


def there(folder: Path) -> list[Path]:
    return sorted(folder.rglob("[!.]*"))


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def mended(folder: Path) -> None:
    verify(folder, partial(repair, folder))


def advised(folder: Path) -> list[list[str]]:
    """The words of the commands that the error of a repair names to fill it again."""
    with pytest.raises(StateError) as caught:
        mended(folder)
    parts = (line.partition(": dstrain ") for line in caught.value.help_lines)
    return [shlex.split(words) for _, found, words in parts if found]


@pytest.mark.parametrize(("at", "lost"), [(-3, 1), (50, 6)], ids=["value", "header"])
def test_a_damaged_shard_is_as_it_was(
    cache: Path, here: Path, at: int, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    damage(only(cache, "shards/*"), at)
    (words,) = advised(cache)
    with caplog.at_level("INFO"):
        assert main(words) == 0
    verify(cache)
    assert values(cache) == values(here / "whole")
    # A damaged value costs its sample; a damaged header costs all of them.
    assert f"{lost} of 6 samples" in caplog.text


def test_damaged_rows_of_a_plan_are_made_again(cache: Path, here: Path) -> None:
    for path in (cache / "plans").glob("*.arrow"):
        damage(path, -3)
    (words,) = advised(cache)
    assert main(words) == 0
    verify(cache)
    assert rows(cache) == rows(here / "whole")


def test_an_index_and_digests_are_made_again(cache: Path) -> None:
    for path, at in ((only(cache, "index/*"), 200), (cache / "digests.npy", -10)):
        whole = path.read_bytes()
        damage(path, at)
        mended(cache)
        assert not path.exists() or path.read_bytes() == whole
    assert len(list((cache / "index").iterdir())) == 1


def test_a_plan_without_its_record_is_removed_and_named(cache: Path) -> None:
    path = only(cache, "plans/*.json")
    damage(path, 30)
    with pytest.raises(StateError, match=path.stem):
        mended(cache)
    assert not path.exists()


@pytest.mark.parametrize("name", ["shards/model.safetensors", "digests.npy"])
def test_a_file_that_stage_1_did_not_write_stays(cache: Path, name: str) -> None:
    (cache / name).write_text("mine")
    with pytest.raises(StateError) as caught:
        mended(cache)
    assert caught.value.where == str(cache / name)
    assert (cache / name).read_text() == "mine"


def test_the_command_that_verify_names_removes_what_is_damaged(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(only(cache, "shards/*"), 50)
    assert main(["cache", "verify", str(cache)]) == 3
    words = capsys.readouterr().err.partition("run: dstrain ")[2].split()
    assert main(words) == 3
    assert "6 of 6 samples" in capsys.readouterr().out
    assert list((cache / "shards").iterdir()) == []


@pytest.mark.parametrize("kind", ["shards/*", "plans/*.json", "plans/*.arrow"])
@pytest.mark.parametrize("found_damaged", [False, True])
def test_what_cannot_be_read_is_not_removed(
    cache: Path, kind: str, found_damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next(cache.glob(kind))
    before = there(cache)

    def repaired(problems: Any) -> None:
        make_unreadable(monkeypatch, path, errno.EIO)
        repair(cache, problems)

    if found_damaged:
        damage(path, -3 if path.suffix == ".arrow" else 50)
        with pytest.raises(SystemFault):
            verify(cache, repaired)
    else:
        make_unreadable(monkeypatch, path, errno.EIO)
        assert main(["cache", "verify", str(cache), "--repair"]) == 4
    assert there(cache) == before


def test_what_others_removed_or_repaired_meanwhile_is_left(cache: Path) -> None:
    shard, plan = only(cache, "shards/*"), only(cache, "plans/*.json")
    gone = [shard.with_stem("0" * 40), plan.with_stem("0" * 40)]
    before = there(cache)
    whole = {path: path.read_bytes() for path in (shard, plan)}
    for path in whole:
        damage(path, 50)
    for path in gone:
        path.write_text("damaged")

    def late(problems: Any) -> None:
        assert {one.path for one in problems} == {*whole, *gone}
        for path, content in whole.items():
            path.write_bytes(content)
        for path in gone:
            path.unlink()
        repair(cache, problems)

    verify(cache, late)
    assert there(cache) == before
    assert whole == {path: path.read_bytes() for path in whole}


@pytest.mark.parametrize("damaged", ["shards", "rows"])
def test_a_plan_that_lacks_values_can_be_removed(cache: Path, damaged: str) -> None:
    plan = only(cache, "plans/*.json")
    rows = cache / f"plans/{read_record(plan)['columns']['samples']}.arrow"
    damage(rows if damaged == "rows" else only(cache, "shards/*"), -3)
    with pytest.raises(StateError) as caught:
        mended(cache)
    assert caught.value.help_lines[-1] == f"to remove a plan, delete {plan}"
    plan.unlink()
    assert main(["cache", "prune", str(cache), "--yes"]) == 0
    verify(cache)


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        ({}, ""),
        ({"model": "tiny", "max_pixels": 4096}, ""),
        ({"folder": "/", "words": ["--toy\n  run: x"]}, ""),
        ({"folder": "/a\x1b[2J", "words": ["--toy"]}, ""),
        ({"folder": "/a", "words": ["--model", "$(x)"]}, "run in /a: dstrain --model '$(x)' "),
    ],
)  # fmt: skip
def test_what_a_plan_records_is_a_quoted_command_of_one_line_or_none(
    config: dict[str, Any], advice: str, cache: Path
) -> None:
    plan = only(cache, "plans/*.json")
    record = read_record(plan)
    record["about"]["config"] = config
    commit_plans(cache, [record])
    damage(only(cache, "shards/*"), -3)
    with pytest.raises(StateError) as caught:
        mended(cache)
    assert caught.value.help_lines[0].startswith(
        f"to fill it again, {advice or 'run the '}"
    )


def test_one_command_fills_two_datasets_again(tiny: Path, tmp_path: Path) -> None:
    here = project(tmp_path)
    shutil.copytree(here / "data", here / "second")
    captions = only(here, "second/metadata.*")
    captions.write_text(captions.read_text().replace("two dogs", "ten dogs"))
    flags = {"validation_dataset_base_path": here / "second"}
    cache = here / "cache"
    train(here, task="sft:data_process", feature_cache=cache, **flags)
    for path in (cache / "shards").iterdir():
        damage(path, 50)
    plans = {*cache.glob("plans/*.json")}
    (words,) = advised(cache)
    assert main(words) == 0
    verify(cache)
    assert {*cache.glob("plans/*.json")} == plans
